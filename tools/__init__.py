"""The project's own tools: set-up, the test host, checks."""
