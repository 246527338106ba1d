"""An HTTP server over a batcher, with OpenAI's chat and completion endpoints: ``vlm-batch serve``."""
