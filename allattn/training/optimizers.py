"""Parameter groups, the optimizer, and the learning rate as a function of the optimizer step."""

import math
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from allattn.model.gated import GatedLM
from allattn.training.config import OptimizerConfig, OptimizerName, ScheduleConfig, Shape
from allattn.training.sharding import clip_sharded


def learning_rate_factor(schedule: ScheduleConfig, step: int) -> float:
    """Learning rate / peak for the update that follows `step` completed ones.

    Linear warm-up that reaches the peak at the last warm-up step, then the schedule's shape; cosine ends
    at `final_ratio` with the last update.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.shape is Shape.constant:
        return 1.0
    rest = max(1, schedule.steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / rest)
    return schedule.final_ratio + (1 - schedule.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def parameter_groups(
    model: GatedLM, gates: nn.Module | None, config: OptimizerConfig, gate_ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Named groups: decayed matrices (of the layers and others), undecayed vectors, gates.

    Each group holds `name`, `params` (name and parameter), `weight_decay` and `learning_rate_ratio`.
    Parameters without effect (of a layer with no heads) are left out.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    in_layers = {id(p) for p in model.layers.parameters()}
    groups: list[dict[str, Any]] = [
        {
            "name": "layer_matrices",
            "params": [(n, p) for n, p in named if p.ndim >= 2 and id(p) in in_layers],
            "weight_decay": config.weight_decay,
            "learning_rate_ratio": 1.0,
        },
        {
            "name": "other_matrices",
            "params": [(n, p) for n, p in named if p.ndim >= 2 and id(p) not in in_layers],
            "weight_decay": config.weight_decay,
            "learning_rate_ratio": 1.0,
        },
        {
            "name": "vectors",
            "params": [(n, p) for n, p in named if p.ndim < 2],
            "weight_decay": 0.0,
            "learning_rate_ratio": 1.0,
        },
    ]
    if gates is not None:
        groups.append(
            {
                "name": "gates",
                "params": [(f"gates.{n}", p) for n, p in gates.named_parameters() if p.numel()],
                "weight_decay": 0.0,
                "learning_rate_ratio": gate_ratio,
            }
        )
    return [group for group in groups if group["params"]]


def make_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool = True
) -> torch.optim.Optimizer:
    """The optimizer over `parameter_groups`.

    LAMB is pytorch-optimizer's (You et al.; moments without bias correction, so that a step's size is the
    learning rate times the weight's norm from the first step on). Gates take LAMB's Adam direction without
    its trust ratio, whose steps are a share of the norm of pi and can never carry pi through 0. AdamW and
    Muon are torch's.

    Args:
        groups: from `parameter_groups`.
        config: name, learning rate, betas, eps.
        fused: AdamW as one kernel, Muon's on GPUs alone; not with fp16, whose gradients must be unscaled
            before clipping.

    Returns:
        The optimizer; a state dict that it loads does not change its options (weight decay, betas, ...).
    """
    optimizer = _new_optimizer(groups, config, fused)
    _keep_options(optimizer)
    return optimizer


def _new_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool
) -> torch.optim.Optimizer:
    betas = (config.betas[0], config.betas[1])
    if config.name is OptimizerName.lamb:
        from allattn.training.lamb import WholeNormLamb

        groups = [{**group, "adam": group["name"] == "gates", "adam_debias": True} for group in groups]
        return WholeNormLamb(groups, lr=config.learning_rate, betas=betas, eps=config.eps)
    if config.name is OptimizerName.muon:
        on_gpu = all(p.is_cuda for group in groups for _, p in group["params"])
        return MuonWithAdamW(groups, config.learning_rate, betas, config.eps, fused and on_gpu)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=fused)


def select_parameters(state: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """An optimizer's state dict with these parameters only, numbered anew; groups without any go."""
    groups: list[dict[str, Any]] = []
    kept: dict[int, Any] = {}
    number = 0
    for group in state["param_groups"]:
        here = [pair for pair in zip(group["params"], group["param_names"], strict=True) if pair[1] in names]
        numbers = list(range(number, number + len(here)))
        number += len(here)
        kept |= {
            new: state["state"][old]
            for new, (old, _) in zip(numbers, here, strict=True)
            if state["state"].get(old)
        }
        if here:
            groups.append({**group, "params": numbers, "param_names": [name for _, name in here]})
    return {**state, "state": kept, "param_groups": groups}


def arranged(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """An optimizer's state dict in the order of other groups, by the parameters' names.

    Parameters that it does not know begin without moments; those that the groups lack go.

    Args:
        state: a state dict, with the names of the parameters.
        groups: from `parameter_groups`.
    """
    known = {
        name: (state["state"].get(number), {**group, "params": [], "param_names": []})
        for group in state["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    arranged_groups: list[dict[str, Any]] = []
    kept: dict[int, Any] = {}
    number = 0
    for group in groups:
        names = [name for name, _ in group["params"]]
        numbers = list(range(number, number + len(names)))
        number += len(names)
        options = next((known[name][1] for name in names if name in known), {})
        arranged_groups.append({**options, "params": numbers, "param_names": names})
        kept |= {
            place: known[name][0]
            for place, name in zip(numbers, names, strict=True)
            if name in known and known[name][0]
        }
    return {**state, "state": kept, "param_groups": arranged_groups}


def moment_names(groups: list[dict[str, Any]], config: OptimizerConfig) -> dict[str, set[str]]:
    """What the optimizer needs of an earlier step, by group: names of a parameter's moments, and `step`.

    Found by one update of a parameter with one element in the place of each group's first.
    """
    small = [
        {**group, "params": [(name, nn.Parameter(torch.ones([1] * p.ndim)))]}
        for group in groups
        for name, p in group["params"][:1]
    ]
    optimizer = _new_optimizer(small, config, fused=False)
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for group in optimizer.param_groups:
        (parameter,) = group["params"]
        entries = optimizer.state[parameter]
        moments = {name for name, value in entries.items() if isinstance(value, Tensor) and value.ndim}
        found[group["name"]] = moments | ({"step"} & {*entries, *group})
    return found


def lacks_moments(state: dict[str, Any], needed: dict[str, set[str]]) -> bool:
    """Whether a state dict lacks, of a parameter that it has entries of, what `moment_names` says."""
    return any(
        not needed.get(group["name"], set()) <= {*entries, *group}
        for group in state["param_groups"]
        for number in group["params"]
        if (entries := state["state"].get(number)) is not None
    )


def _keep_options(optimizer: torch.optim.Optimizer) -> None:
    """Let `load_state_dict` restore what the steps made; what the settings say stays as they say it now."""
    options = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]

    def with_options(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(state["param_groups"], options, strict=True)
        return {**state, "param_groups": [saved | own for saved, own in pairs]}

    optimizer.register_load_state_dict_pre_hook(with_options)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for the group `layer_matrices`, torch's AdamW for the others, as one optimizer.

    Muon's updates are scaled to AdamW's root mean square, so that both take the same learning rate.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool = False,
    ) -> None:
        muon = torch.optim.Muon([torch.zeros(1, 1)], lr=lr, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([torch.zeros(1)], lr=lr, betas=betas, eps=eps, fused=fused)
        super().__init__(groups, {**adamw.defaults, **muon.defaults, "lr": lr, "betas": betas, "eps": eps})
        self._parts = (muon, adamw)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon, adamw = self._parts
        muon.param_groups = [g for g in self.param_groups if g["name"] == "layer_matrices"]
        adamw.param_groups = [g for g in self.param_groups if g["name"] != "layer_matrices"]
        for part in self._parts:
            part.state = self.state
            part.step()
        return loss


def set_learning_rates(optimizer: torch.optim.Optimizer, peak: float, factor: float) -> None:
    """Give every group peak * factor * its own ratio."""
    for group in optimizer.param_groups:
        group["lr"] = peak * factor * group["learning_rate_ratio"]


def clip_gradients(parameters: list[nn.Parameter], largest_norm: float) -> Tensor:
    """Scale gradients to a total norm of at most `largest_norm` (0 = leave them); the norm before."""
    if any(isinstance(p, DTensor) for p in parameters):
        return clip_sharded(parameters, largest_norm)
    return nn.utils.clip_grad_norm_(parameters, largest_norm or math.inf)
