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

# Variables of Google Cloud.
variable "project" {
  description = "Project that has the resources."
  type        = string
}

variable "region" {
  description = "Region of the networks."
  type        = string
  default     = "us-east4"
}

variable "zone" {
  description = "Zone of the nodes, in the region; it must have the machine type."
  type        = string
  default     = "us-east4-b"
}

variable "machine_type" {
  description = "Type of a node: eight H200 with eight RDMA interfaces."
  type        = string
  default     = "a3-ultragpu-8g"
}

variable "gpus_per_node" {
  description = "GPUs of the machine type, with an RDMA interface for each."
  type        = number
  default     = 8
}

variable "image" {
  description = "Image with NVIDIA's driver for this machine type, and Python 3.11 or newer, as PROJECT/FAMILY."
  type        = string
  default     = "ubuntu-os-accelerator-images/ubuntu-accelerator-2404-amd64-with-nvidia-580"
}

variable "shared_gib" {
  description = "Size of the shared file system (Filestore) in GiB."
  type        = number
  default     = 2560
}

variable "ssh_cidrs" {
  description = "Networks from which ssh reaches the nodes; that of Google's Identity-Aware Proxy unless changed."
  type        = list(string)
  default     = ["35.235.240.0/20"]

  validation {
    condition     = !contains(var.ssh_cidrs, "0.0.0.0/0")
    error_message = "ssh from everywhere is refused: name your own network."
  }
}

variable "reservation" {
  description = "Name of the reservation that has the nodes; null: any capacity there is, which GPU types seldom have."
  type        = string
  default     = null
}
