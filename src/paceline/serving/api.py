"""The public parts of `paceline.serving`: other packages import nothing else of it."""

__all__ = [
    *("READY", "ServedModel", "ServerConfig", "absolute", "bench", "check", "message_of", "read_state", "run_server"),
]
