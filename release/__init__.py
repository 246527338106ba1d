"""What a release is made of, beside the wheel: its address, its try-out, its formula."""
