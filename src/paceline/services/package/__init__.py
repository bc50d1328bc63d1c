"""A folder that builds and serves away from this workspace: Dockerfile, exact versions, models, script and server."""
