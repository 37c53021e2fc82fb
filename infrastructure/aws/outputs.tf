output "nodes" {
  description = "Private addresses of the nodes, the first one first."
  value       = aws_instance.node[*].private_ip
}

output "runs" {
  description = "Where the runs are, on every node."
  value       = "/mnt/shared/runs"
}

output "log" {
  description = "How to follow the training: log in by Session Manager, then journalctl -fu paceline-node."
  value       = "aws ssm start-session --region ${var.region} --target ${aws_instance.node[0].id}"
}

output "cost_per_hour" {
  description = "What the nodes cost in an hour, without disks; 0 where node_price_per_hour is not given."
  value       = var.cluster_size * var.node_price_per_hour
}
