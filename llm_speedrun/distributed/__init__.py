"""Several processes: their group, what they agree on, who watches whom, what a message costs. Imports what lies below a run."""
