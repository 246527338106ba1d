"""State that outlives rows, in one budget of bytes."""
