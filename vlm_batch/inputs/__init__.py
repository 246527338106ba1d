"""Preparation of requests: media, chats, templates and processors."""
