"The tiny Qwen3 model that the harness has scored: its weights come from numpy, whose generators keep their numbers."
from pathlib import Path
import numpy as np, torch
from llm_speedrun.export import write_folder
from llm_speedrun.model import GPT, GPTConfig

HERE = Path(__file__).parent
TINY = GPTConfig(name="tiny", vocab=400, layers=2, width=32, heads=4, kv_heads=2, hidden=48, seq=48)

def tiny_model(out):
    "Write it to `out`, with its tokenizer, as `transformers` reads it"
    rng, model = np.random.default_rng(61), GPT(TINY)
    state = {k: torch.from_numpy(rng.standard_normal(v.shape, dtype=np.float32)) * .3 for k, v in model.state_dict().items()}
    state |= {k: 1 + v if v.ndim == 1 else v if "embed" in k else v / 4 for k, v in state.items()}
    write_folder(out, TINY, state, HERE/"tokenizer.json")
    return Path(out)
