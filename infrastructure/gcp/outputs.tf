output "nodes" {
  description = "Private addresses of the nodes, the first one first."
  value       = google_compute_instance.node[*].network_interface[0].network_ip
}

output "runs" {
  description = "Where the runs are, on every node."
  value       = "/mnt/shared/runs"
}

output "log" {
  description = "How to follow the training."
  value       = "gcloud compute ssh ${google_compute_instance.node[0].name} --zone ${var.zone} --tunnel-through-iap -- journalctl -fu paceline-node"
}

output "cost_per_hour" {
  description = "What the nodes cost in an hour, without disks; 0 where node_price_per_hour is not given."
  value       = var.cluster_size * var.node_price_per_hour
}
