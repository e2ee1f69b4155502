"""Second moments M of a layer's inputs, and rounding of its weights that minimizes J.

    J(q) = Σ_op B_op d_oᵀ M d_p,   d_o = q_o - w_o / s_o

B is the result of `output_effects`, in squares of the layer's steps, or, if there is none, the identity, so that every output is rounded
by itself.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

COLUMNS = 2048  # the most weights of an output that are rounded together
ALIKE = 0.9  # ρ
PARTS, FEWEST = 8, 256  # in how many parts of a row weights move at once, and how many columns a part has at least
SWEEPS = 64  # at most: the first take most of J away
JOINT_SWEEPS = 256  # at most, where outputs are rounded together: each sweep moves a quarter of them
ENOUGH = 1e-6  # of the largest change: what float32 tells


class Moment:
    """The mean of x xᵀ in blocks of `COLUMNS`, and of x: float32.

    blocks  for each, (groups, columns, columns)
    sums    (groups, columns), and of squares
    taps    columns of one input channel, beside each other
    """

    def __init__(self, groups: int, columns: int, taps: int, device: torch.device) -> None:
        width = max(taps, COLUMNS // taps * taps)
        self.bounds = [(start, min(start + width, columns)) for start in range(0, columns, width)]
        self.blocks = [torch.zeros(groups, end - start, end - start, device=device, dtype=torch.float32) for start, end in self.bounds]
        self.sums = torch.zeros(groups, columns, device=device, dtype=torch.float32)
        self.taps, self.rows = taps, 0

    def add(self, rows: Tensor) -> None:
        """Take in (groups, places, columns)."""
        for block, (start, end) in zip(self.blocks, self.bounds, strict=True):
            part = rows[:, :, start:end]
            block += part.transpose(1, 2) @ part
        self.sums += rows.sum(1)
        self.rows += rows.shape[1]

    def parts(self, real: Tensor, share: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each block the weights in steps, (groups, outputs, columns), and M with a share of S, (groups, columns, columns)."""
        grouped = real.view(len(self.sums), -1, real.shape[1])
        for block, (start, end) in zip(self.blocks, self.bounds, strict=True):
            moment, mean = block / self.rows, self.sums[:, start:end] / self.rows
            yield grouped[:, :, start:end], (1 - share) * moment + share * self._smooth(moment, mean)

    def _smooth(self, moment: Tensor, mean: Tensor) -> Tensor:
        """S, whose channels have the mean and the variance of all their taps."""
        taps, (groups, size) = self.taps, mean.shape
        mean = mean.view(groups, -1, taps).mean(2)
        square = torch.diagonal(moment, dim1=1, dim2=2).view(groups, -1, taps).mean(2)
        variance = (square - mean.square()).clamp_min(0)
        means = mean.repeat_interleave(taps, 1)
        smooth = means.unsqueeze(2) * means.unsqueeze(1)
        kernel = torch.full((taps, taps), ALIKE, device=mean.device, dtype=torch.float32).fill_diagonal_(1.0)
        channel = torch.arange(size // taps, device=mean.device)
        smooth.view(groups, -1, taps, size // taps, taps)[:, channel, :, channel, :] += variance.t().reshape(-1, groups, 1, 1) * kernel
        return smooth

    def noise(self, integers: Tensor, real: Tensor) -> float:
        """Return the error of a layer's sums by its integer weights, relative to their power: at most 1, averaged over outputs."""
        total, signal = (torch.zeros(len(real), dtype=torch.float64, device=real.device) for _ in range(2))
        for into, value in ((total, integers - real), (signal, real)):
            grouped = value.view(len(self.sums), -1, value.shape[1])
            for block, (start, end) in zip(self.blocks, self.bounds, strict=True):
                part = grouped[:, :, start:end]
                into += ((part @ block) * part).sum(2).flatten().double()
        return float((total.clamp_min(0) / signal.clamp_min(1e-30)).clamp_max(1).mean())


def flipped(real: Tensor, moment: Tensor, low: int, high: int) -> Tensor:
    """Return rounded weights (groups, outputs, columns): from the nearest integers, at most `SWEEPS` steps per part of a row that lower J.

    Each step moves the weight that lowers J most by one. Weights that are exactly 0 stay 0.

    real    weights in steps, (groups, outputs, columns)
    moment  M, (groups, columns, columns)
    """
    _, outputs, columns = real.shape
    parts = max(1, min(PARTS, columns // FEWEST))
    margin = -columns % parts
    at = torch.round(real).clamp_(low, high)
    gradient, result = ((at - real) @ moment).flatten(0, 1), at.clone().flatten(0, 1)
    at, row, pruned = at.flatten(0, 1), torch.arange(len(result), device=real.device), (real == 0).flatten(0, 1)
    group = row // outputs
    diagonal = torch.diagonal(moment, dim1=1, dim2=2)[group]
    enough = -ENOUGH * diagonal.amax(1, keepdim=True)
    starts = torch.arange(parts, device=real.device) * ((columns + margin) // parts)
    for _ in range(SWEEPS):
        step = -torch.sign(gradient)
        change = torch.addcmul(diagonal, gradient, step, value=2)
        change.masked_fill_((at + step < low) | (at + step > high) | pruned, 0)
        gain, place = F.pad(change, (0, margin)).view(len(change), parts, -1).min(2)
        gain, order = gain.sort(1)
        place = (place + starts).gather(1, order).clamp_max(columns - 1)
        step = step.gather(1, place)
        lines = moment[group.unsqueeze(1), place]  # of M, for each of the places
        moved = torch.zeros_like(gain)
        for index in range(parts):  # those that were moved before count
            others = (moved * lines.gather(2, place[:, index].view(-1, 1, 1).expand(-1, parts, 1)).squeeze(2)).sum(1)
            moved[:, index] = step[:, index] * (gain[:, index] + 2 * step[:, index] * others < enough[:, 0])
        gradient += (moved.unsqueeze(1) @ lines).squeeze(1)
        at.scatter_add_(1, place, moved)
        finished = ~(moved != 0).any(1)
        if bool(finished.any()):
            result[row[finished]] = at[finished]
            state = (row, group, gradient, diagonal, enough, at, pruned)
            row, group, gradient, diagonal, enough, at, pruned = (part[~finished] for part in state)
            if not len(row):
                break
    result[row] = at
    return result.view_as(real)


def joint_noise(parts: list[tuple[Tensor, Tensor]], effect: Tensor) -> float:
    """J of errors in steps, (outputs, columns), beside M of their columns, one pair for each block."""
    return sum(float(((effect @ error @ moment) * error).sum()) for error, moment in parts)


def _one_after_another(gain: Tensor, beside: Tensor, enough: float) -> Tensor:
    """Return a mask (steps,) of greedily chosen steps that change J by less than `enough`. `beside` holds half of each pair's term."""
    gains, pairs = gain.cpu().numpy().copy(), (2 * beside).cpu().numpy()  # numpy: a tensor's call costs more than a short row's sum
    chosen = []
    for index in range(len(gains)):
        if gains[index] < enough:
            chosen.append(index)
            gains += pairs[index]
    mask = torch.zeros(len(gain), dtype=torch.bool, device=gain.device)
    mask[chosen] = True
    return mask


def flipped_together(start: Tensor, real: Tensor, moment: Tensor, effect: Tensor, low: int, high: int) -> Tensor:
    """Return rounded weights (outputs, columns): from `start`, steps of one that lower J most, in a quarter of the outputs at once.

    Weights that are exactly 0 stay 0.

    start, real  integers and weights in steps, (outputs, columns)
    moment       M, (columns, columns)
    effect       B, (outputs, outputs)
    """
    at = start.clone()
    gradient = effect @ (at - real) @ moment
    diagonal = effect.diagonal().unsqueeze(1) * moment.diagonal().unsqueeze(0)
    enough, pruned = -ENOUGH * float(diagonal.amax()), real == 0
    for _ in range(JOINT_SWEEPS):
        step = -torch.sign(gradient)
        change = torch.addcmul(diagonal, gradient, step, value=2)
        change.masked_fill_((at + step < low) | (at + step > high) | pruned, 0)
        gain, place = change.min(1)
        rows = gain.argsort()[: -(-len(gain) // 4)]
        gain, place = gain[rows], place[rows]
        step = step[rows, place]
        beside = effect[rows][:, rows] * moment[place][:, place] * step.unsqueeze(1) * step.unsqueeze(0)
        chosen = _one_after_another(gain, beside, enough)
        if not bool(chosen.any()):
            break
        rows, place, step = rows[chosen], place[chosen], step[chosen]
        at[rows, place] += step
        gradient += (effect[:, rows] * step) @ moment[place]
    return at
