"""From a request to a processor's output: pictures, videos, chats and processing."""
