"Processes that a program has started, found in /proc."
from pathlib import Path

def environment(pid):
    return dict(o.split("=", 1) for o in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in o)

def workers(pid):
    "Rank -> process, of those that the command has started"
    try: found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError: return {}
    res = {}
    for c in found:
        try: res |= {int(r): int(c)} if (r := environment(c).get("RANK")) else workers(c)
        except (FileNotFoundError, ProcessLookupError, PermissionError): pass # it has just ended
    return res
