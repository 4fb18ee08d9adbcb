"""A language-model trainer that is also a course: the notebooks in nbs write its modules.

Where things are:

- the model, its attention, its loss: model.py (GPT, naive_attention, cross_entropy); rungs put
  others in their place: set_parts for parts of the blocks, as rungs/flash.py does for the
  attention, and a loss for the model's, as rungs/chunked_ce.py does
- how the loss of a step comes about: train/train_step.py (TrainStep, a step of training) calls a
  GuardedStepper (recipes/schedules.py), which is a Stepper (stepper.py, Stepper.forward_backward).
  That calls the run's loss (runs.py, model_loss), which rungs/cuda_graphs.py and rungs/ddp.py
  replace, and that the model's
- a rung, a recipe: rungs/, recipes/; runs.py (Run, rung, build). the module of what find_rung
  returns is the file of a rung (rung_registry.py), and so for a recipe with find_recipe
  (recipes/recipe_spec.py)
- the training loop: train/trainer.py (Trainer.loop); what the options leave open is decided before
  it, in train/resolve.py
- when a checkpoint is valid: checkpoint/format.py (write_checkpoint writes the manifest last and
  renames; validation_error); several processes: checkpoint/save_sharded.py
- what a logged step has besides its loss: train/telemetry.py (Telemetry.watch, a context that
  Stepper.update enters) measures norms and reads counts; train/metrics.py (MetricsLogger) writes
  rows and passes them to TensorBoard and W&B
- what SIGTERM does: train/console.py (Signals) notes it, Trainer.loop ends, Trainer.stop_fast
  saves; train/launch.py (run_train) has the exit code. Before the loop it ends the process, and
  there is nothing to save
- how several GPUs agree: train/coordinator.py (Coordinator.exchange_flags) by
  distributed/liveness.py (FlagExchange, which waits for no GPU); PeerWatchdog there notices who is
  lost
- how gradients are shared: sharding.py (ParallelStepSync); rungs/ddp.py, rungs/fsdp.py,
  rungs/tensor_parallel.py
- how Muon's work is shared: sharding.py (divide_work); the same gradients on all:
  recipes/muon_update.py (split_among_ranks); parts of matrices: recipes/sharded_muon.py
- data: data/: text to tokens (data/corpus.py, data/prepare_data.py), tokens to batches
  (data/batches.py, data/loader.py)
- commands and their options: cli.py, train/config.py
- a model of transformers, trained in place: accelerate.py (accelerate, Accelerated.step)
- what skips an update, ends a run early, scores it on the way: recipes/spikes.py (SpikeGuard);
  train/trainer.py (Trainer.log_eval); tools/scores.py (Scores)
- trained weights: reading, export, text, scores: pretrained.py; tools/export.py; generate.py,
  kv_cache.py and tools/sample.py; tools/likelihood.py and tools/evals.py
- measuring, records, predictions: timing.py, measure.py, records.py; roofline.py predicts what
  op_counter.py has counted, of any model tools/explain.py, of a run step_prediction.py, for a GPU
  that isn't here datasheets.py; benchmarks/ against other projects, with entries of the one-GPU
  track (benchmarks/track.py); verdicts.py decides whether a rung stays in a list and whether a
  claim holds; course.py has what only the notebooks use

`help("llm_speedrun.train")` and so on say what a folder holds, and what it may import.
"""

__version__ = "0.1.0"
