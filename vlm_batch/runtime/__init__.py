"""The process around MLX: its environment, threads and memory."""
