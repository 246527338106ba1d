"""What must happen before MLX starts: a fast BLAS, CUDA's launches, threads that outlive their engines."""
