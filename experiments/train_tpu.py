"""Train a decoder with the functional API alone: jit, a mesh, Orbax checkpoints, the same file on every host.

    python experiments/train_tpu.py --data text.txt --out-dir runs/one                            one device
    python experiments/train_tpu.py ... --mesh data=2,fsdp=2                                      a mesh of one host
    python experiments/train_tpu.py ... --coordinator 127.0.0.1:9000 --processes 2 --process 0    one of two processes
    python experiments/train_tpu.py ... --distributed                                             every host of a TPU VM

docs/tpu_vm.md has the whole commands. `riftco pretrain` and `riftco.train.train` do more (evaluation while training,
signals, metrics to the bit after a kill); this file shows that the pieces are enough. It starts again from its newest
checkpoint when it finds one.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import riftco
from riftco import data, models, optim, train
from riftco.checkpoints import Checkpoints
from riftco.tokenizers import ByteTokenizer


class State(NamedTuple):
    """Everything that training changes."""

    params: Any
    optimizer: optim.AdamState


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a UTF-8 text file; the last tenth is held out")
    parser.add_argument("--out-dir", required=True, help="metrics.jsonl goes here, written by process 0")
    parser.add_argument(
        "--checkpoint-dir", help="a path that all processes reach, gs://… on a pod; OUT_DIR/checkpoints"
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--max-seq-length", type=int, default=64)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of one step, all devices together")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--mesh", help="data=N or data=N,fsdp=M; all devices by `data` where several processes run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--distributed", action="store_true", help="let jax find the other hosts by itself")
    parser.add_argument("--coordinator", help="host:port of process 0, to name the others by hand")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


def make_step(config: models.DecoderConfig, options: argparse.Namespace, where: State | None, rows: Any) -> Any:
    """step(state, batch) -> (state, loss, stats), jitted and donating the state."""
    rate = optim.schedule("cosine", peak=options.learning_rate, total_steps=options.max_steps, warmup_steps=10)
    _, update = optim.adam(rate, b2=0.99, weight_decay=0.1, decay_mask=models.decay_mask(config))
    dtype = None if options.dtype == "float32" else options.dtype

    def step(state: State, batch: dict[str, Any]) -> Any:
        def loss(params: Any) -> Any:
            return models.loss(params, batch["tokens"], batch["targets"], config, dtype=dtype)

        params = state.params
        if where is not None:  # whole weights for the work, each device on its own rows; gradients back in shares
            everywhere = jax.tree.map(whole_on, where.params)
            params = jax.lax.with_sharding_constraint(params, everywhere)
        value, grads = riftco.value_and_grad(loss)(params)
        if where is not None:
            grads = jax.lax.with_sharding_constraint(grads, where.params)
        new_params, optimizer, stats = update(grads, state.optimizer, state.params)
        return State(new_params, optimizer), value, stats

    if where is None:
        return jax.jit(step, donate_argnums=0)
    return jax.jit(step, donate_argnums=0, in_shardings=(where, rows), out_shardings=(where, None, None))


def whole_on(sharding: Any) -> Any:
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())


def held_out_loss(params: Any, config: models.DecoderConfig, ids: Any, options: argparse.Namespace, mesh: Any) -> float:
    """The exhaustive evaluator: every target of the held-out split once."""
    windows = data.evaluation_windows(ids, options.max_seq_length, options.batch_size, padded=True)
    return train.evaluate(params, config, windows, mesh=mesh).loss


def refuse_failed(sent: tuple[int, Any, Any, Any] | None) -> None:
    """Stop at a step, as (number, loss, stats, batch), of which nothing took effect."""
    if sent is not None and not bool(sent[2].ok):
        number, loss, stats, batch = sent
        raise SystemExit(
            f"step {number}: loss {float(loss)} or gradient norm {float(stats.grad_norm)} is not finite on "
            f"{batch.describe()}"
        )


def main() -> None:
    options = arguments()
    if options.distributed or options.coordinator:
        train.connect(options.coordinator, options.processes, options.process)
    mesh = train.parse_mesh(options.mesh)
    is_first = jax.process_index() == 0

    text = data.load_texts(options.data, validation_fraction=0.1)
    tokenizer = ByteTokenizer.train(bytes(range(256)))
    config = models.preset(options.preset, vocab_size=tokenizer.vocab_size, context=options.max_seq_length)
    streams = train.streams(options.seed)
    source = data.UniformWindowSource(
        data.encode_text(tokenizer, text.train), options.max_seq_length, options.batch_size, streams.data
    )
    my_rows = train.process_rows(mesh, options.batch_size, options.batch_size)

    # A fresh state, made where it will live; or the newest one saved, whatever the number of devices it was saved from.
    init_optimizer, _ = optim.adam(0.0)
    where = rows = None
    if mesh is not None:
        params, scalar = train.shardings(config, mesh), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        where, rows = State(params, optim.AdamState(scalar, params, params)), train.batch_sharding(mesh)

    @functools.partial(jax.jit, out_shardings=where)
    def fresh() -> State:
        params = models.init(streams.init, config)
        return State(params, init_optimizer(params))

    checkpoints = Checkpoints(options.checkpoint_dir or Path(options.out_dir) / "checkpoints", keep=2, best_metric=None)
    identity = {"model": config.to_dict(), "data": source.fingerprint, "learning_rate": options.learning_rate}
    first = 0
    if checkpoints.latest() is None:
        state = fresh()
    else:
        like = jax.eval_shape(fresh)
        if where is not None:
            place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            like = jax.tree.map(place, like, where)
        state, _, first = checkpoints.restore(None, like, config=identity)

    if is_first:
        count = models.parameter_count(config)
        print(f"{count:,} parameters, {jax.device_count()} devices, {jax.process_count()} processes, from step {first}")
        Path(options.out_dir).mkdir(parents=True, exist_ok=True)
    step = make_step(config, options, where, rows)
    clock, logged, before = time.perf_counter(), first, None
    for number in range(first, options.max_steps):
        batch = source.batch(number, my_rows)  # a function of (seed, step): nothing to skip after a restart
        arrays = {"tokens": batch.tokens, "targets": batch.targets}
        state, loss, stats = step(state, train.place_batch(arrays, mesh, options.batch_size))
        done = number + 1
        is_logged = done % options.log_every == 0 or done == options.max_steps
        is_saved = done % options.save_every == 0 or done == options.max_steps
        # Every step is looked at, one behind the device, so that this does not wait for the step just sent; but
        # nothing is said or saved of a step before it is known to have worked.
        refuse_failed(before)
        before = (done, loss, stats, batch)
        if is_logged or is_saved:
            refuse_failed(before)
        if is_logged:
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            speed = (done - logged) * options.batch_size * options.max_seq_length / seconds
            logged = done
            record = {"phase": "train", "step": done, "loss": float(loss), "grad_norm": float(stats.grad_norm)}
            if is_first:
                print(f"step {done:5}/{options.max_steps} | loss {record['loss']:.4f} | {speed:,.0f} tok/s", flush=True)
                with open(Path(options.out_dir) / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
        if is_saved:
            checkpoints.save(done, state, {"config": identity})  # every process takes part
    validation = held_out_loss(state.params, config, data.encode_text(tokenizer, text.validation), options, mesh)
    checkpoints.close()
    if is_first:
        print(f"validation loss {validation:.4f} nats a byte ({np.log2(np.e) * validation:.4f} bits)")


if __name__ == "__main__":
    main()
