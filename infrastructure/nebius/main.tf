# GPU nodes on one InfiniBand fabric, with a file system that all of them mount.

locals {
  gib       = 1024 * 1024 * 1024
  mount_tag = "shared"
}

resource "nebius_compute_v1_gpu_cluster" "fabric" {
  parent_id         = var.project_id
  name              = "${var.name}-fabric"
  infiniband_fabric = var.infiniband_fabric
}

resource "nebius_compute_v1_filesystem" "shared" {
  parent_id        = var.project_id
  name             = "${var.name}-shared"
  type             = "NETWORK_SSD"
  size_bytes       = var.shared_gib * local.gib
  block_size_bytes = 4096
}

resource "nebius_compute_v1_disk" "boot" {
  count = var.cluster_size

  parent_id        = var.project_id
  name             = "${var.name}-boot-${count.index}"
  type             = "NETWORK_SSD"
  size_bytes       = 200 * local.gib
  block_size_bytes = 4096

  source_image_family = {
    image_family = var.image_family
  }

  # Another image would replace the disks of running nodes.
  lifecycle {
    ignore_changes = [source_image_family]
  }
}

resource "nebius_compute_v1_instance" "node" {
  count = var.cluster_size

  parent_id = var.project_id
  name      = "${var.name}-${count.index}"

  gpu_cluster = {
    id = nebius_compute_v1_gpu_cluster.fabric.id
  }

  resources = {
    platform = var.platform
    preset   = var.preset
  }

  boot_disk = {
    attach_mode   = "READ_WRITE"
    existing_disk = { id = nebius_compute_v1_disk.boot[count.index].id }
  }

  filesystems = [{
    attach_mode         = "READ_WRITE"
    mount_tag           = local.mount_tag
    existing_filesystem = { id = nebius_compute_v1_filesystem.shared.id }
  }]

  network_interfaces = [{
    name              = "eth0"
    subnet_id         = var.subnet_id
    ip_address        = {}
    public_ip_address = var.has_public_address ? {} : null
  }]

  cloud_init_user_data = templatefile("${path.module}/../cloud-init.yaml.tftpl", {
    node_index      = count.index
    cluster_size    = var.cluster_size
    gpus_per_node   = var.gpus_per_node
    training_epochs = var.training_epochs
    save_frequency  = var.save_frequency
    config          = var.config
    source_url      = var.source_url
    source_ref      = var.source_ref
    ssh_public_key  = var.ssh_public_key
    packages        = ["git", "python3-venv"]
    network         = "infiniband"
    mount_options   = "-t virtiofs"
    mount_source    = local.mount_tag
    start_node      = filebase64("${path.module}/../start_node.sh")
  })

  # cloud-init reads its data once in the life of a node: another text would stop the node, and change nothing.
  lifecycle {
    ignore_changes = [cloud_init_user_data]
  }
}
