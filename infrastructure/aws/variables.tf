# Variables that all clouds have, with the same names and defaults.
variable "cluster_size" {
  description = "Number of GPU nodes."
  type        = number
  default     = 1

  validation {
    condition     = var.cluster_size >= 1 && floor(var.cluster_size) == var.cluster_size
    error_message = "cluster_size is a whole number of nodes, at least 1."
  }
}

variable "training_epochs" {
  description = "Epochs to train: train.epochs of the config."
  type        = number
  default     = 10
}

variable "save_frequency" {
  description = "Epochs between checkpoints: checkpoint.every_epochs of the config."
  type        = number
  default     = 5
}

variable "name" {
  description = "Name of the cluster, before the names of all its resources."
  type        = string
  default     = "paceline"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,20}$", var.name))
    error_message = "name has at most 21 small letters, digits and dashes."
  }
}

variable "source_url" {
  description = "Git repository with Paceline, which the nodes can clone without credentials."
  type        = string
}

variable "source_ref" {
  description = "Branch or tag of the repository."
  type        = string
  default     = "main"
}

variable "config" {
  description = "Config to train: a path inside the repository, or on the shared file system (/mnt/shared)."
  type        = string
  default     = "configs/digits.yaml"
}

variable "ssh_public_key" {
  description = "Public key of whoever may log in as paceline; empty: nobody."
  type        = string
  default     = ""
}

variable "node_price_per_hour" {
  description = "What a node costs in an hour by your price list, for the output cost_per_hour; 0: not known."
  type        = number
  default     = 0
}

# Variables of AWS.
variable "region" {
  description = "Region of the nodes."
  type        = string
  default     = "us-east-1"
}

variable "subnet_id" {
  description = "Private subnet in a zone that has the instance type. Nodes need a way out (NAT) to install packages."
  type        = string
}

variable "instance_type" {
  description = "Type of a node."
  type        = string
  default     = "p5.48xlarge"
}

variable "gpus_per_node" {
  description = "GPUs of the instance type."
  type        = number
  default     = 8
}

variable "efa_interfaces" {
  description = "Network cards of the instance type, each with an EFA interface: 32 of p5.48xlarge, 4 of p4d.24xlarge; 0: TCP alone."
  type        = number
  default     = 32
}

variable "ssh_cidrs" {
  description = "Networks from which ssh reaches the nodes; none: through Session Manager alone."
  type        = list(string)
  default     = []

  validation {
    condition     = !contains(var.ssh_cidrs, "0.0.0.0/0")
    error_message = "ssh from everywhere is refused: name your own network."
  }
}

variable "shared_gib" {
  description = "Size of the shared file system (FSx for Lustre) in GiB: 1200, or a multiple of 2400."
  type        = number
  default     = 1200
}

variable "capacity_reservation_id" {
  description = "Reservation or Capacity Block that has the nodes (cr-...); null: on demand, which GPU types seldom have."
  type        = string
  default     = null
}

variable "is_capacity_block" {
  description = "Whether capacity_reservation_id is a Capacity Block, not a reservation."
  type        = bool
  default     = false
}
