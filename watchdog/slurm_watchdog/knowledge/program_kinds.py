"""What a program is about, told by the functions that its main thread is in: it trains, or it serves.

Of value for jobs that write no step: a training whose ranks have not moved for long hangs, and a server that
no one asks waits. A row is (function pattern, file pattern), both matched as a whole. Sources: the packages
of the frameworks named, as their dumps show them (torch 2.13, transformers 5.23, lightning 2.6, deepspeed
0.19, composer 0.32, vllm, sglang, text-generation-inference, Ray Serve).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from slurm_watchdog.model.evidence import Frame

TRAINS: Final[tuple[tuple[str, str], ...]] = (
    (r".*", r".*torch/(optim/(?!lr_scheduler)\w+|amp/grad_scaler|cuda/amp/grad_scaler)\.py"),
    (r"backward|_engine_run_backward", r".*torch/(autograd/\w+|_tensor)\.py"),
    (r"_inner_training_loop|training_step|train", r".*(transformers|trl)/.*\.py"),
    (r".*", r".*lightning/(pytorch/loops/(fit_loop|training_epoch_loop|optimization/.*)|fabric/.*)\.py"),
    (r"backward|step|train_batch|_exec_(forward|backward)\w*|_exec_optimizer_step", r".*deepspeed/runtime/.*\.py"),
    (r"_train_loop|_train_batch\w*|_train_microbatch\w*|fit", r".*composer/trainer/.*\.py"),
    (r".*", r".*(mmengine/runner/loops|fastai/learner|megatron/(core/pipeline_parallel|training)/.*|torchtitan/train\w*|nemo/.*train\w*)\.py"),
    (r"fit|train_function|train_step\w*|one_step_on_data", r".*keras/.*\.py"),
    (r"learn|train|collect_rollouts|training_step", r".*(stable_baselines3|sb3_contrib|rllib|tianshou|skrl|rsl_rl|rl_games)/.*\.py"),
    (r"(_*(run_)?(pre|fine_?)?train(ing)?(_(one_)?(step|epoch|batch|loop|iter|iteration|model|worker|fn))?|one_train_step|optimizer_step|forward_backward\w*)", r".*"),
    (r".*", r"(.*/)?(run_)?_?(pre|fine_?)?(train|tun)(ing|e|er)?(_\w+)?\.py"),
)  # fmt: skip
"""Functions of a training loop; last, how people name their own functions, and the scripts that they start."""

SERVES: Final[tuple[tuple[str, str], ...]] = (
    (r".*", r".*(uvicorn|gunicorn|hypercorn|granian|waitress|werkzeug|flask|fastapi|starlette|aiohttp/web\w*|tornado|sanic|gradio|streamlit|cherrypy|bentoml|"
            r"litserve|ts/(service|model_service\w*)|tritonserver|triton_python_backend\w*|ray/serve|vllm|sglang|text_generation_server|lmdeploy|"
            r"tensorrt_llm|mlserver|xinference)(/.*)?\.py"),
    (r"serve|serve_forever|handle_request|wait_for_termination|accept|_?accept_loop", r".*"),
    (r"run_forever|run_until_complete|_run_once", r".*asyncio/.*\.py"),
    (r".*", r".*(ipykernel|IPython|jupyter\w*|zmq/eventloop|xmlrpc/server|http/server|socketserver|distributed/worker|dask/.*|celery/.*|rq/.*|kombu/.*)(/.*)?(\.py)?"),
    (r"_?(server|service|request|serving|inference|engine|event)_?loop\w*|run_busy_loop|event_loop_\w+|serving_\w+|poll_requests?|wait_for_requests?|"
     r"get_next_request|handle_requests?|process_requests?|recv_requests?|listen", r".*"),
)  # fmt: skip
"""Functions that wait for someone else's request, however long that takes."""


@lru_cache(maxsize=8192)
def _is_one_of(rows: tuple[tuple[str, str], ...], function: str, file: str) -> bool:
    name = function.rpartition(".")[2]
    return any(re.fullmatch(f, name) and re.fullmatch(p, file) for f, p in rows)


def trains(frames: Iterable[Frame]) -> bool:
    """Whether a thread with these frames is in the loop of a training."""
    return any(_is_one_of(TRAINS, frame.function, frame.file) for frame in frames)


def serves(frames: Iterable[Frame]) -> bool:
    """Whether a thread with these frames waits for requests, or handles one."""
    return any(_is_one_of(SERVES, frame.function, frame.file) for frame in frames)
