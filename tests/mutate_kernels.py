"""Breaks each Triton kernel in a copy of the package, and says which breaks no test notices. Exits with 1 if there are any.
    tests/mutate_kernels.py              all; those that only a GPU shows are left out where there is none
    tests/mutate_kernels.py row_lse gpu  those of a function, or that only a GPU shows
A row of `MUTANTS` has a module, a function in it, text of that function, what to put there, and tests of which one must fail. On a GPU
each runs in a process of its own, since an access beyond the memory ends the process."""
import ast, os, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS, LOSSES, FP8, MUON = "rungs/test_kernels.py", "rungs/test_losses.py", "rungs/test_fp8.py", "recipes/test_fast_muon.py"
MUTANTS = [row for row in """
rungs/triton.py | norm_kernel | tl.load(x_ptr + offs, mask=mask, other=0.) | tl.load(x_ptr + offs) | KERNELS
rungs/triton.py | norm_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/triton.py | norm_backward_kernel | dw += dn*xh | dw = dn*xh | KERNELS
rungs/triton.py | norm_backward_kernel | tl.load(h_ptr + offs, mask=mask, other=0.) | tl.load(h_ptr + offs) | KERNELS
rungs/triton.py | norm_backward_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fused_ops.py | swiglu_kernel | tl.load(ab_ptr + offs_m*2*F + offs_n[None, :], mask=mask, other=0.) | tl.load(ab_ptr + offs_m*2*F + offs_n[None, :]) | KERNELS
rungs/fused_ops.py | swiglu_kernel | a*tl.sigmoid(a)*b, mask=mask) | a*tl.sigmoid(a)*b) | KERNELS
rungs/fused_ops.py | swiglu_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fused_ops.py | swiglu_backward_kernel | tl.load(dh_ptr + offs_m*F + offs_n[None, :], mask=mask, other=0.) | tl.load(dh_ptr + offs_m*F + offs_n[None, :]) | KERNELS
rungs/fused_ops.py | swiglu_backward_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/qk_rope.py | load_halves | tl.load(ptr + offs, mask=mask, other=0.) | tl.load(ptr + offs) | KERNELS
rungs/qk_rope.py | head_grad | mask=mask & (head >= H) | mask=mask | KERNELS
rungs/qk_rope.py | qk_rope_kernel | .to(tl.int64) |  | KERNELS
rungs/qk_rope.py | qk_rope_backward_kernel | dwa, dwb = dwa + ga, dwb + gb | dwa, dwb = ga, gb | KERNELS
rungs/qk_rope.py | qk_rope_backward_kernel | v = tl.load(dv_ptr + n*K*D + vhead*D + j, mask=vhead < K) | v = tl.load(dv_ptr + n*K*D + vhead*D + j) | KERNELS
rungs/qk_rope.py | qk_rope_backward_kernel | tl.program_id(0).to(tl.int64) | tl.program_id(0) | KERNELS | gpu
rungs/loss_kernels.py | read_logits | tl.load(ptr, mask=mask, other=float("-inf"), | tl.load(ptr, | KERNELS
rungs/loss_kernels.py | row_lse | s = s*tl.exp2(m - new) + tl.sum( | s = s + tl.sum( | LOSSES
rungs/loss_kernels.py | row_lse | s = s*tl.exp2(m - new) + tl.exp2( | s = s + tl.exp2( | LOSSES
rungs/loss_kernels.py | row_lse | tl.sum(s*tl.exp2(m - top), 0) | tl.sum(s, 0) | LOSSES
rungs/loss_kernels.py | logit_grad | g *= factor | g *= 1 | LOSSES
rungs/loss_kernels.py | logit_grad | g *= 1 - t*t | g *= 1 | LOSSES
rungs/loss_kernels.py | write_grads | softcap), mask=i + rest < V) | softcap)) | KERNELS
rungs/chunked_ce.py | softmax_loss_kernel | .to(tl.int64) |  | KERNELS
rungs/chunked_ce.py | softmax_loss_kernel | tl.debug_barrier() | pass | LOSSES | gpu
rungs/fp8_loss.py | loss_lse_kernel | .to(tl.int64) |  | KERNELS
rungs/fp8_loss.py | loss_lse_kernel | + z_loss*lse*lse |  | LOSSES
rungs/fp8_loss.py | random_bits | & most[:, None] | & 0 | FP8
rungs/fp8_loss.py | logits_quantize_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_loss.py | logits_quantize_kernel | g *= (1 + 2*z_loss*lse)[:, None] | g *= 1 | LOSSES FP8
rungs/fp8_loss.py | logits_quantize_kernel | g *= 1 - t*t | g *= 1 | LOSSES FP8
rungs/fp8_loss.py | logits_quantize_kernel | y = tl.load(y_ptr + offs_m, mask=offs_m < N, other=ignore_index) | y = tl.load(y_ptr + offs_m) | KERNELS
rungs/grouped_ce.py | mean_loss_kernel | .to(tl.int64) |  | KERNELS
rungs/grouped_ce.py | mean_loss_kernel | write_grads(x_ptr, offs, shift, 1 + 2*z_loss*lse, | write_grads(x_ptr, offs, shift, 1., | LOSSES
rungs/grouped_ce.py | mean_loss_kernel | one *= 1 - | one *= 1 + 0* | LOSSES
rungs/grouped_ce.py | mean_loss_kernel | + z_loss*lse*lse |  | LOSSES
rungs/grouped_ce.py | mean_loss_kernel | tl.debug_barrier() | pass | LOSSES | gpu
rungs/grouped_ce.py | mul_kernel | tl.load(x_ptr + i, mask=i < N) | tl.load(x_ptr + i) | KERNELS
rungs/grouped_ce.py | mul_kernel | tl.program_id(0).to(tl.int64) | tl.program_id(0) | KERNELS | gpu
rungs/vocab_parallel.py | part_stats_kernel | .to(tl.int64) |  | KERNELS
rungs/vocab_parallel.py | part_grads_kernel | .to(tl.int64) |  | KERNELS
rungs/vocab_parallel.py | part_grads_kernel | tl.debug_barrier() # all others are stored | pass | LOSSES | gpu
rungs/fp8_epilogues.py | summed_loss_kernel | .to(tl.int64) |  | KERNELS
rungs/fp8_epilogues.py | summed_loss_kernel | tl.load(sums_ptr + row*T + i, mask=i < T, other=0.) | tl.load(sums_ptr + row*T + i) | KERNELS
rungs/fp8_matmul_ops.py | gated8_back_kernel | (4*i + p).to(tl.int64) | (4*i + p) | KERNELS
rungs/fp8_matmul_ops.py | gated8_back_kernel | (4*i + p < N)[:, None] & | (4*i + p >= 0)[:, None] & | KERNELS
rungs/fp8_matmul_ops.py | store_packed4 | offs_n.to(tl.int64) | offs_n | KERNELS
rungs/fp8_matmul_ops.py | running_amax | tl.maximum(m_h, tl.abs(h)) | tl.abs(h) | rungs/test_epilogues.py
rungs/fp8_kernels.py | wide_load | tl.load(ptr, mask=mask, other=0.) | tl.load(ptr) | KERNELS
rungs/fp8_kernels.py | store_both | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_kernels.py | store_both | offs_n.to(tl.int64) | offs_n | KERNELS
rungs/fp8_kernels.py | store_both | tl.trans(h).to(dt), mask=t_mask) | tl.trans(h).to(dt)) | KERNELS
rungs/fp8_kernels.py | quantize_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_kernels.py | sum_squares | squares += h*h | squares = h*h | KERNELS FP8
rungs/fp8_kernels.py | sum_squares | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_kernels.py | norm_quantize_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_kernels.py | swiglu_quantize_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_kernels.py | swiglu_backward_quantize_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_kernels.py | value_heads | amax = tl.maximum(amax, tl.max(magnitude(g), 1)) | amax = tl.max(magnitude(g), 1) | FP8
rungs/fp8_kernels.py | value_heads | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_kernels.py | rotated_heads | dwa, dwb = dwa + ga, dwb + gb | dwa, dwb = ga, gb | FP8
rungs/fp8_kernels.py | rotated_heads | amax = tl.maximum(amax, tl.max(tl.maximum(magnitude(da), magnitude(db)), 1)) | amax = tl.max(tl.maximum(magnitude(da), magnitude(db)), 1) | FP8
rungs/fp8_kernels.py | rotated_heads | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/folded_norm.py | place_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/folded_norm.py | place_kernel | tl.load(w_ptr + i*d + offs_n[None, :], mask=mask, other=0.) | tl.load(w_ptr + i*d + offs_n[None, :]) | KERNELS
rungs/folded_norm.py | rstd_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/folded_norm.py | rstd_kernel | tl.load(x_ptr + offs, mask=mask, other=0.) | tl.load(x_ptr + offs) | KERNELS
rungs/folded_norm.py | heads_backward_kernel | tl.program_id(0).to(tl.int64) | tl.program_id(0) | KERNELS | gpu
rungs/folded_norm.py | heads_backward_kernel | dwa + da_, dwb + db_ | da_, db_ | KERNELS
rungs/folded_norm.py | scale_sum_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/folded_norm.py | scale_sum_kernel | tl.load(g_ptr + i*step + offs_n[None, :], mask=mask, other=0.) | tl.load(g_ptr + i*step + offs_n[None, :]) | KERNELS
rungs/folded_norm.py | sums_rstd_kernel | offs_m.to(tl.int64) | offs_m | KERNELS
rungs/fp8_dynamic_scaling.py | heads_round_kernel | most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL) | most = x | rungs/test_flash4.py
rungs/fp8_dynamic_scaling.py | heads_round_kernel | (n // H).to(tl.int64) | (n // H) | KERNELS
rungs/fp8_dynamic_scaling.py | heads_round_kernel | n.to(tl.int64)*T*D | n*T*D | KERNELS
rungs/fp8_dynamic_scaling.py | heads_round_kernel | tl.abs(tl.load(x_ptr + offs_m*t_stride + i, mask=offs_m < T, other=0.) | tl.abs(tl.load(x_ptr + offs_m*t_stride + i) | KERNELS
rungs/flash4.py | attention8_kernel | l, m = l*fade + | l, m = l + | rungs/test_flash4.py
rungs/flash4.py | attention8_kernel | o*fade[:, None] | o | rungs/test_flash4.py
rungs/flash4.py | attention8_kernel | kv.to(tl.int64)*T*D, v_ptr | kv*T*D, v_ptr | KERNELS
rungs/flash4.py | attention8_kernel | n.to(tl.int64)*T*D + offs_m | n*T*D + offs_m | KERNELS
rungs/flash4.py | attention8_kernel | (n // H).to(tl.int64) | (n // H) | KERNELS
rungs/flash4.py | attention8_kernel | d[:, None], mask=mask[None, :], other=0.) | d[:, None]) | KERNELS
rungs/fp8_dynamic_scaling.py | swiglu_keep_kernel | .to(tl.int64) |  | KERNELS
rungs/fp8_dynamic_scaling.py | swiglu_keep_kernel | tl.load(ab_ptr + offs, mask=mask, other=0.) | tl.load(ab_ptr + offs) | KERNELS
rungs/fp8_dynamic_scaling.py | swiglu_kept_backward_kernel | .to(tl.int64) |  | KERNELS
rungs/tied_embedding.py | add_row | token.to(tl.int64) | token | KERNELS
rungs/tied_embedding.py | group_sums_kernel | sums += | sums = | rungs/test_tied_embedding.py
rungs/tied_embedding.py | cut_groups_kernel | sums += | sums = | rungs/test_tied_embedding.py
rungs/tied_embedding.py | cut_groups_kernel | inside = offs*CHUNK < N | inside = offs*CHUNK >= 0 | KERNELS
rungs/embedding_rows.py | take_rows_kernel | other=0).to(tl.int64) | other=0) | KERNELS
rungs/embedding_rows.py | take_rows_kernel | offs.to(tl.int64) | offs | KERNELS
rungs/embedding_rows.py | take_rows_kernel | mask=mask & known | mask=mask | KERNELS
rungs/multi_tensor_adamw.py | load_weights | tl.load(p_ptr + i, mask=mask, other=0.) | tl.load(p_ptr + i) | KERNELS
rungs/multi_tensor_adamw.py | load_moments | mask=block < n_blocks, other=0.) | other=None) | KERNELS
rungs/multi_tensor_adamw.py | load_moments | return tl.load(m_ptr + i, mask=mask), | return tl.load(m_ptr + i), | KERNELS
rungs/multi_tensor_adamw.py | adamw_kernel | g *= factor | pass | rungs/test_memory_traffic.py
rungs/multi_tensor_adamw.py | round_block | bits += r & 0xFFFF | bits += 0 | rungs/test_optim.py
rungs/multi_tensor_adamw.py | adamw_kernel | block, n_blocks = start//BLOCK + k | block, n_blocks = start//BLOCK | rungs/test_optim.py
recipes/fast_muon.py | gather_kernel | k.to(tl.int64) | k | KERNELS
recipes/fast_muon.py | gather_kernel | tl.load(g_ptr + offs, mask=mask, other=0.) | tl.load(g_ptr + offs) | KERNELS
recipes/muon_kernels.py | inverse_norm | total += | total = | MUON
recipes/muon_kernels.py | polynomial_kernel | k.to(tl.int64) | k | KERNELS
recipes/muon_kernels.py | squares_kernel | total += o*o | total = o*o | MUON
recipes/muon_kernels.py | squares_kernel | k.to(tl.int64) | k | KERNELS
recipes/muon_kernels.py | variance_kernel | tl.load(old_ptr + j, mask=mask, other=0.) | tl.load(old_ptr + j) | KERNELS
recipes/muon_kernels.py | apply_kernel | k.to(tl.int64) | k | KERNELS
recipes/fast_muon.py | symmetric_kernel | res = tl.dot(x, y, res) | res = tl.dot(x, y) | MUON
recipes/fast_muon.py | symmetric_kernel | x_ptr += k.to(tl.int64) | x_ptr += k | KERNELS
recipes/fast_muon.py | symmetric_kernel | o_ptr += k.to(tl.int64) | o_ptr += k | KERNELS
recipes/muon_kernels.py | load_tile | mask=mask, other=0. |  | KERNELS
""".strip().splitlines()]

def mutated(source, function, old, new):
    "Return a module's source with `new` for the first `old` in a function"
    node, = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == function)
    text = ast.get_source_segment(source, node)
    if old not in text: raise ValueError(f"{function} has no {old!r}: the table must follow the kernel")
    return source.replace(text, text.replace(old, new, 1))

def parsed(row):
    "Return module, function, old and new text, test files, and whether only a GPU shows it"
    module, function, old, new, tests, *gpu = row.split(" | ") if " |  | " not in row else row.replace(" |  | ", " | \0 | ").split(" | ")
    return module, function, old, new.replace("\0", ""), [globals().get(t, t) for t in tests.split()], bool(gpu)

def survives(row):
    "Return whether all tests of a mutant pass"
    module, function, old, new, tests, _ = parsed(row)
    with tempfile.TemporaryDirectory() as tmp:
        shutil.copytree(ROOT/"llm_speedrun", Path(tmp)/"llm_speedrun", ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(tmp)/"llm_speedrun"/module
        path.write_text(mutated(path.read_text(encoding="utf-8"), function, old, new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(ROOT/"tests"/t for t in tests)]
        p = subprocess.run(command, cwd=tmp, env=os.environ | dict(PYTHONPATH=os.pathsep.join([tmp, *filter(None, [os.environ.get("PYTHONPATH")])])), capture_output=True, text=True)
        if p.returncode in (2, 3, 4, 5): raise RuntimeError(f"the tests of {row!r} didn't run:\n{p.stdout[-2000:]}") # pytest's own errors
        return p.returncode == 0

def main(words):
    import torch
    here = [r for r in MUTANTS if torch.cuda.is_available() or not parsed(r)[-1]]
    rows = [r for r in here if not words or parsed(r)[1] in words or "gpu" in words and parsed(r)[-1]]
    alive = []
    with ThreadPoolExecutor(1 if torch.cuda.is_available() else os.cpu_count()) as pool:
        for r, lives in zip(rows, pool.map(survives, rows)):
            alive.append(lives)
            print("SURVIVES " if lives else "noticed  ", r, flush=True)
    print(f"{len(rows) - sum(alive)} of {len(rows)} mutants are noticed; {len(MUTANTS) - len(here)} need a GPU")
    return int(any(alive))

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
