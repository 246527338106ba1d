"""This library against the other batchers of vision-language models on MLX: python -m benchmarks.compare --help"""
