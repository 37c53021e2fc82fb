# GPU nodes side by side in one placement group, with an EFA interface on every network card, and a Lustre file system.

data "aws_subnet" "nodes" {
  id = var.subnet_id
}

data "aws_ami" "gpu" {
  most_recent = true
  owners      = ["amazon"]

  filter {
    name   = "name"
    values = ["Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"] # Python 3.12, NVIDIA's driver, EFA and aws-ofi-nccl
  }

  filter {
    name   = "architecture"
    values = ["x86_64"]
  }
}

resource "aws_placement_group" "nodes" {
  name     = var.name
  strategy = "cluster"
}

# EFA asks for a group that lets its members at each other's ports, in both directions.
resource "aws_security_group" "nodes" {
  name        = "${var.name}-nodes"
  description = "Nodes of the Paceline cluster ${var.name}"
  vpc_id      = data.aws_subnet.nodes.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "among_nodes" {
  description                  = "Everything among nodes: NCCL takes free ports"
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_ingress_rule" "ssh" {
  for_each = toset(var.ssh_cidrs)

  description       = "ssh of administrators"
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
}

resource "aws_vpc_security_group_egress_rule" "among_nodes" {
  description                  = "Everything among nodes, as EFA asks"
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "packages" {
  description       = "Packages, the repository and AWS itself"
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_egress_rule" "mirrors" {
  description       = "Ubuntu's package mirrors"
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 80
  to_port           = 80
}

resource "aws_fsx_lustre_file_system" "shared" {
  #checkov:skip=CKV_AWS_190:encrypted with the key that AWS manages; runs hold no data that needs a key of one's own
  storage_capacity            = var.shared_gib
  subnet_ids                  = [var.subnet_id]
  security_group_ids          = [aws_security_group.nodes.id]
  deployment_type             = "PERSISTENT_2"
  per_unit_storage_throughput = 250
  copy_tags_to_backups        = true
}

data "aws_iam_policy_document" "assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "node" {
  name               = "${var.name}-node"
  assume_role_policy = data.aws_iam_policy_document.assume.json
}

resource "aws_iam_role_policy_attachment" "session_manager" {
  role       = aws_iam_role.node.name
  policy_arn = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

resource "aws_iam_instance_profile" "node" {
  name = "${var.name}-node"
  role = aws_iam_role.node.name
}

resource "aws_launch_template" "node" {
  name          = "${var.name}-node"
  image_id      = data.aws_ami.gpu.id
  instance_type = var.instance_type
  ebs_optimized = true

  iam_instance_profile {
    name = aws_iam_instance_profile.node.name
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  monitoring {
    enabled = true
  }

  placement {
    group_name = aws_placement_group.nodes.name
  }

  block_device_mappings {
    device_name = "/dev/sda1"

    ebs {
      volume_size = 200
      volume_type = "gp3"
      encrypted   = true
    }
  }

  # A Capacity Block is a market of its own: an instance that does not name it is refused in one.
  dynamic "instance_market_options" {
    for_each = var.is_capacity_block ? ["capacity-block"] : []

    content {
      market_type = instance_market_options.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = var.capacity_reservation_id == null ? [] : [var.capacity_reservation_id]

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  # The first card carries TCP/IP as well; the others carry RDMA alone.
  dynamic "network_interfaces" {
    for_each = range(max(1, var.efa_interfaces))

    content {
      network_card_index    = network_interfaces.value
      device_index          = network_interfaces.value == 0 ? 0 : 1
      interface_type        = var.efa_interfaces == 0 ? "interface" : network_interfaces.value == 0 ? "efa" : "efa-only"
      subnet_id             = var.subnet_id
      security_groups       = [aws_security_group.nodes.id]
      delete_on_termination = true
    }
  }

  # All nodes keep the image that the first apply found: a newer one would replace them in the middle of a run.
  lifecycle {
    ignore_changes = [image_id]

    precondition {
      condition     = !var.is_capacity_block || var.capacity_reservation_id != null
      error_message = "is_capacity_block needs capacity_reservation_id, the id of the Capacity Block (cr-...)."
    }
  }
}

resource "aws_instance" "node" {
  #checkov:skip=CKV_AWS_8:the launch template encrypts the disk, which this check does not follow
  #checkov:skip=CKV_AWS_79:the launch template asks for tokens of the metadata service, likewise
  #checkov:skip=CKV_AWS_126:the launch template turns monitoring on, likewise
  #checkov:skip=CKV_AWS_135:the launch template asks for EBS optimization, likewise
  #checkov:skip=CKV2_AWS_41:the launch template has the instance profile, likewise
  count = var.cluster_size

  launch_template {
    id      = aws_launch_template.node.id
    version = aws_launch_template.node.latest_version
  }

  user_data = templatefile("${path.module}/../cloud-init.yaml.tftpl", {
    node_index      = count.index
    cluster_size    = var.cluster_size
    gpus_per_node   = var.gpus_per_node
    training_epochs = var.training_epochs
    save_frequency  = var.save_frequency
    config          = var.config
    source_url      = var.source_url
    source_ref      = var.source_ref
    ssh_public_key  = var.ssh_public_key
    packages        = ["curl", "git", "python3-venv"]
    network         = var.efa_interfaces > 0 ? "efa" : "tcp"
    mount_options   = "-t lustre -o noatime,flock"
    mount_source    = "${aws_fsx_lustre_file_system.shared.dns_name}@tcp:/${aws_fsx_lustre_file_system.shared.mount_name}"
    start_node      = filebase64("${path.module}/../start_node.sh")
  })

  tags = { Name = "${var.name}-${count.index}" }

  # cloud-init reads its data once in the life of a node: another text would stop the node, and change nothing.
  lifecycle {
    ignore_changes = [user_data]
  }
}
