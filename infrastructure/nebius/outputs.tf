output "nodes" {
  description = "Addresses of the nodes, the first one first."
  value       = [for node in nebius_compute_v1_instance.node : node.status.network_interfaces[0].ip_address.address]
}

output "runs" {
  description = "Where the runs are, on every node."
  value       = "/mnt/shared/runs"
}

output "log" {
  description = "How to follow the training."
  value       = "ssh paceline@${split("/", nebius_compute_v1_instance.node[0].status.network_interfaces[0].ip_address.address)[0]} journalctl -fu paceline-node"
}

output "cost_per_hour" {
  description = "What the nodes cost in an hour, without disks; 0 where node_price_per_hour is not given."
  value       = var.cluster_size * var.node_price_per_hour
}
