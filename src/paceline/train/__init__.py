"""The loop: one step, the trainer around it, and what runs every n steps."""
