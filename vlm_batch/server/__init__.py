"""HTTP server with OpenAI's chat and completion endpoints: ``vlm-batch serve``."""
