"""``python -m vlm_batch`` is the command ``vlm-batch``."""

from vlm_batch.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
