"""The room of CUDA: our kernels, and code that spares MLX kernels and plans there.

``adapters/operations.py`` is the only door: it asks this room for attention, products, convolutions and activations, and
takes another way where the room returns None. Nothing here runs on a Mac.

- ``launches``: how a kernel is built, launched, and compared before it is trusted
- ``one_query``, ``few_bits``: attention of a decode step, over slabs and over slabs in few bits
- ``qmm``, ``flat``: products of few rows and weights in few bits, and the layers that make them
- ``delta``: the gated delta rule of recurrent layers
- ``plans``, ``windows``: attention of prompts and towers in few shapes, since cuDNN plans each
- ``convolution``, ``fused``: convolutions without cuDNN's graphs, and operations that are one launch
- ``compiling``: MLX's own kernels, compiled before the first prompt
"""
