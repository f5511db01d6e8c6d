"""Process utilities: user-facing errors, signals, child processes, reporters, CPU limits, HTTP and credentials."""
