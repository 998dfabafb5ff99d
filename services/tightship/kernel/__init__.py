"""The system calls: the only place with ctypes. Nothing here knows a container. Standard library only."""
