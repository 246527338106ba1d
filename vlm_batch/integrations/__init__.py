"""Programs of other projects with this library's engine."""
