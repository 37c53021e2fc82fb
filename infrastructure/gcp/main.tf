# GPU nodes side by side, with one network for TCP/IP, one for RDMA (GPUDirect, an interface for each GPU), and Filestore.

locals {
  node_range = "10.64.0.0/16"
}

resource "google_compute_network" "nodes" {
  name                    = "${var.name}-nodes"
  auto_create_subnetworks = false
  mtu                     = 8896
}

resource "google_compute_subnetwork" "nodes" {
  #checkov:skip=CKV_GCP_26:flow logs of training traffic would cost more than they tell; the network is the cluster's own
  name                     = "${var.name}-nodes"
  network                  = google_compute_network.nodes.id
  region                   = var.region
  ip_cidr_range            = local.node_range
  private_ip_google_access = true
}

resource "google_compute_network" "rdma" {
  #checkov:skip=CKV2_GCP_18:an RDMA network takes no firewall rules: nothing but its own interfaces is on it
  name                    = "${var.name}-rdma"
  auto_create_subnetworks = false
  mtu                     = 8896
  network_profile         = "projects/${var.project}/global/networkProfiles/${var.zone}-vpc-roce"
}

resource "google_compute_subnetwork" "rdma" {
  #checkov:skip=CKV_GCP_26:an RDMA network has no flow logs
  #checkov:skip=CKV_GCP_74:nodes reach Google's interfaces through the other network
  count = var.gpus_per_node

  name          = "${var.name}-rdma-${count.index}"
  network       = google_compute_network.rdma.id
  region        = var.region
  ip_cidr_range = "10.${128 + count.index}.0.0/16"
}

resource "google_compute_firewall" "among_nodes" {
  name          = "${var.name}-among-nodes"
  description   = "Everything among nodes: NCCL takes free ports"
  network       = google_compute_network.nodes.id
  source_ranges = [local.node_range]
  target_tags   = [var.name]

  allow {
    protocol = "all"
  }
}

resource "google_compute_firewall" "ssh" {
  name          = "${var.name}-ssh"
  description   = "ssh of administrators"
  network       = google_compute_network.nodes.id
  source_ranges = var.ssh_cidrs
  target_tags   = [var.name]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

# The way out to packages: nodes have no public addresses.
resource "google_compute_router" "out" {
  name    = "${var.name}-out"
  network = google_compute_network.nodes.id
  region  = var.region
}

resource "google_compute_router_nat" "out" {
  name                               = "${var.name}-out"
  router                             = google_compute_router.out.name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

resource "google_filestore_instance" "shared" {
  name     = "${var.name}-shared"
  location = var.zone
  tier     = "BASIC_SSD"

  file_shares {
    name        = "shared"
    capacity_gb = var.shared_gib

    nfs_export_options {
      ip_ranges   = [local.node_range]
      access_mode = "READ_WRITE"
      squash_mode = "NO_ROOT_SQUASH"
    }
  }

  networks {
    network = google_compute_network.nodes.name
    modes   = ["MODE_IPV4"]
  }
}

resource "google_compute_resource_policy" "side_by_side" {
  name   = "${var.name}-side-by-side"
  region = var.region

  group_placement_policy {
    collocation = "COLLOCATED"
  }
}

resource "google_service_account" "node" {
  account_id   = "${var.name}-node"
  display_name = "Nodes of the Paceline cluster ${var.name}: no rights of their own"
}

resource "google_compute_instance" "node" {
  #checkov:skip=CKV_GCP_38:disks are encrypted with keys that Google manages; they hold no data that needs others
  count = var.cluster_size

  name                      = "${var.name}-${count.index}"
  zone                      = var.zone
  machine_type              = var.machine_type
  tags                      = [var.name]
  resource_policies         = [google_compute_resource_policy.side_by_side.id]
  allow_stopping_for_update = true

  boot_disk {
    initialize_params {
      image = var.image
      size  = 200
      type  = "hyperdisk-balanced"
    }
  }

  network_interface {
    subnetwork = google_compute_subnetwork.nodes.id
    nic_type   = "GVNIC"
  }

  dynamic "network_interface" {
    for_each = google_compute_subnetwork.rdma[*].id

    content {
      subnetwork = network_interface.value
      nic_type   = "MRDMA"
    }
  }

  dynamic "reservation_affinity" {
    for_each = var.reservation == null ? [] : [var.reservation]

    content {
      type = "SPECIFIC_RESERVATION"

      specific_reservation {
        key    = "compute.googleapis.com/reservation-name"
        values = [reservation_affinity.value]
      }
    }
  }

  scheduling {
    automatic_restart   = true
    on_host_maintenance = "TERMINATE" # GPU nodes cannot move while they run: SIGTERM, save, start again
  }

  shielded_instance_config {
    enable_secure_boot          = true
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  service_account {
    email  = google_service_account.node.email
    scopes = ["logging-write", "monitoring-write"]
  }

  metadata = {
    block-project-ssh-keys = "true"
    user-data = templatefile("${path.module}/../cloud-init.yaml.tftpl", {
      node_index      = count.index
      cluster_size    = var.cluster_size
      gpus_per_node   = var.gpus_per_node
      training_epochs = var.training_epochs
      save_frequency  = var.save_frequency
      config          = var.config
      source_url      = var.source_url
      source_ref      = var.source_ref
      ssh_public_key  = var.ssh_public_key
      packages        = ["curl", "git", "nfs-common", "python3-venv"]
      network         = "gib"
      mount_options   = "-t nfs -o rw,hard,noatime"
      mount_source    = "${google_filestore_instance.shared.networks[0].ip_addresses[0]}:/shared"
      start_node      = filebase64("${path.module}/../start_node.sh")
    })
  }

  # A newer image of the family would replace running nodes. cloud-init reads its data once in the life of a node.
  lifecycle {
    ignore_changes = [boot_disk[0].initialize_params[0].image, metadata["user-data"]]
  }
}
