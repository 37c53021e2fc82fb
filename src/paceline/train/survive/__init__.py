"""What happens when a step or a rank goes wrong."""
