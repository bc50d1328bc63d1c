"""What the workers do on simulated nodes (`paceline compute add ... --kind sim`): nothing else of this file runs there."""

EVENTS = [
    {"at": 0, "line": "rank {rank} of {size} begins on {node}"},
    {"at": 0.5, "every": 0.5, "until": 2, "line": "step {n}"},
    {"at": 0.5, "every": 0.5, "until": 2, "metric": "loss", "value": 0.25},
    {"at": 2, "exit": 0},
]
