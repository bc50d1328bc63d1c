"""Models that answer HTTP: a group of processes that `python -m paceline.serving CONFIG.json` starts.

    clients ── front ──┬── model process    one thread, one model
                       ├── model process
                       └── ...

The front holds all connections and runs nobody's code; it needs starlette and uvicorn. A model process runs the scoring
script or the model and needs the standard library alone, for its interpreter is the model's own. Each has a socket to the
front, which gives it a request, or a batch of them, when it has answered the last.
"""

from paceline.serving.model.client import is_client_disconnected as is_client_disconnected
