"""Operation of a tuneline installation: machine checks, garbage collection and storage probes."""
