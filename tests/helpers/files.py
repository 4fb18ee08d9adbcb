"How tests read the repository's files."
import yaml

def read_yaml(path): return yaml.safe_load(path.read_text(encoding="utf-8"))
