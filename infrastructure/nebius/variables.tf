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

# Variables of Nebius.
variable "project_id" {
  description = "Project that has the resources (project-...)."
  type        = string
}

variable "subnet_id" {
  description = "Subnet of the nodes (vpcsubnet-...). Nodes need a way out to install packages."
  type        = string
}

variable "infiniband_fabric" {
  description = "InfiniBand fabric of the region and platform: nebius documentation, GPU clusters."
  type        = string
  default     = "fabric-3"
}

variable "platform" {
  description = "GPU platform."
  type        = string
  default     = "gpu-h100-sxm"
}

variable "preset" {
  description = "Size of a node; only those with 8 GPUs join an InfiniBand fabric."
  type        = string
  default     = "8gpu-128vcpu-1600gb"
}

variable "gpus_per_node" {
  description = "GPUs of the preset."
  type        = number
  default     = 8
}

variable "image_family" {
  description = "Image with NVIDIA's and Mellanox' drivers, and Python 3.11 or newer."
  type        = string
  default     = "ubuntu24.04-cuda12"
}

variable "shared_gib" {
  description = "Size of the shared file system in GiB."
  type        = number
  default     = 1024
}

variable "has_public_address" {
  description = "Give the nodes public addresses, for ssh from outside; else they are reached through your network."
  type        = bool
  default     = false
}
