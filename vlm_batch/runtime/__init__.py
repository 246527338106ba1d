"""Settings that must be made before MLX starts (BLAS, CUDA launches), threads for engines, and memory given back."""
