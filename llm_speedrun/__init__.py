"""A language-model trainer that is also a course: the notebooks in nbs write its modules.

Where things are:

- the model, its attention, its loss: model.py (GPT, GPT.loss); rungs replace parts of it by
  set_parts, rungs/flash.py the attention
- how the loss of a step comes about: train/train_step.py (TrainStep, a step of training) calls
  stepper.py (Stepper.forward_backward), that Run.loss, which rungs/chunked_ce.py and others replace
- a rung, a recipe: rungs/, recipes/; runs.py (Run, rung, build), rung_registry.py has their names
  and options
- the training loop: train/trainer.py (Trainer.loop); train/resolve.py has decided before what the
  options leave open
- when a checkpoint is valid: checkpoint/format.py (write_checkpoint writes the manifest last and
  renames; validation_error); several processes: checkpoint/save_sharded.py
- what SIGTERM does: train/console.py (Signals) notes it, Trainer.run_loop leaves the loop,
  Trainer.stop_fast saves; train/launch.py (run_train) has the exit codes
- how several GPUs agree: train/coordinator.py (Coordinator.exchange_flags) by
  distributed/liveness.py (FlagExchange, which waits for no GPU); PeerWatchdog there notices who is
  lost
- how gradients are shared: sharding.py (ParallelStepSync); rungs/ddp.py, rungs/fsdp.py,
  rungs/tensor_parallel.py
- data: data/: text to tokens (data/corpus.py, data/prepare_data.py), tokens to batches
  (data/batches.py, data/loader.py)
- commands and their options: cli.py, train/config.py
- trained weights: reading, export, text, scores: pretrained.py; tools/export.py, generate.py,
  kv_cache.py and tools/sample.py, tools/evals.py
- measuring, records, predictions: timing.py, measure.py, records.py; roofline.py predicts what
  op_counter.py has counted; benchmarks/ against other projects; course.py has what only the
  notebooks use

`help("llm_speedrun.train")` and so on say what a folder holds, and what it may import.
"""

__version__ = "0.1.0"
