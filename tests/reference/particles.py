"""Kernels, bandwidths and particle rules, one pair of particles at a time.

Letters are those of An et al. 2020: theta the particles [M, D], g the gradients of the mean loss, kappa a kernel with
its bandwidth fixed, alpha, beta, epsilon, xi, tau and N as in the equations. Kernels are differentiated by autograd.
"""

# The papers' letters include capital M, N and R.
# ruff: noqa: N803, N806

import math
from collections.abc import Callable

import torch
from torch import Tensor

Kappa = Callable[[Tensor, Tensor], Tensor]


def rbf(h: float) -> Kappa:
    """kappa(x, y) = exp(-|x - y|^2 / h)."""
    return lambda x, y: torch.exp(-((x - y) ** 2).sum() / h)


def imq(h: float) -> Kappa:
    """kappa(x, y) = (1 + |x - y|^2 / h)^(-1/2)."""
    return lambda x, y: (1 + ((x - y) ** 2).sum() / h) ** -0.5


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """kappa(x, y) = x.y / (|x| |y|)."""
    return (x * y).sum() / ((x * x).sum().sqrt() * (y * y).sum().sqrt())


def directions(kappa: Kappa) -> Kappa:
    """Return kappa on x / |x| and y / |y|."""
    return lambda x, y: kappa(x / (x * x).sum().sqrt(), y / (y * y).sum().sqrt())


def median_bandwidth(theta: Tensor) -> float:
    """Return h = med^2 / log M with med the median of the distances between particles i < j."""
    M = len(theta)
    if M == 1:
        return 1.0
    distances = [math.dist(theta[i].tolist(), theta[j].tolist()) for i in range(M) for j in range(i + 1, M)]
    return _median(distances) ** 2 / math.log(M) or 1.0


def released_bandwidth(theta: Tensor) -> float:
    """Return h = med / log(M + 1) with med the median of all M^2 squared distances, diagonal included."""
    M = len(theta)
    squares = [math.dist(theta[i].tolist(), theta[j].tolist()) ** 2 for i in range(M) for j in range(M)]
    return _median(squares) / math.log(M + 1) or 1.0


def repulsion(theta: Tensor, kappa: Kappa) -> Tensor:
    """R_i = sum_j grad_{theta_j} kappa(theta_j, theta_i)."""
    rows = []
    for i in range(len(theta)):
        R = torch.zeros_like(theta[i])
        for j in range(len(theta)):
            if j != i:
                R = R + _gradient(kappa, theta[j], theta[i])
        rows.append(R)
    return torch.stack(rows)


def tangential_repulsion(theta: Tensor, kappa: Kappa) -> Tensor:
    """R_i = -sum_j grad_{theta_i} kappa(theta_i, theta_j)."""
    rows = []
    for i in range(len(theta)):
        R = torch.zeros_like(theta[i])
        for j in range(len(theta)):
            if j != i:
                R = R - _gradient(kappa, theta[i], theta[j])
        rows.append(R)
    return torch.stack(rows)


def svgd(
    theta: Tensor,
    g: Tensor,
    kappa: Kappa,
    R: Tensor,
    *,
    alpha: float,
    epsilon: float,
    tau: float,
    N: float,
    beta: float,
    smoothing: bool,
) -> Tensor:
    """-epsilon phi_i = epsilon / M [ sum_j kappa(theta_j, theta_i) (beta N g_j + tau theta_j) - alpha R_i ]."""
    M = len(theta)
    rows = []
    for i in range(M):
        phi = -alpha * R[i]
        for j in range(M):
            weight = kappa(theta[j], theta[i]) if smoothing else float(i == j)
            phi = phi + weight * (beta * N * g[j] + tau * theta[j])
        rows.append(epsilon * phi / M)
    return torch.stack(rows)


def spos(
    theta: Tensor,
    g: Tensor,
    kappa: Kappa,
    R: Tensor,
    xi: Tensor,
    *,
    alpha: float,
    epsilon: float,
    tau: float,
    N: float,
    beta: float,
    smoothing: bool,
) -> Tensor:
    """The SVGD step at temperature 1, plus epsilon / beta grad U(theta_i) - epsilon sqrt(2 / (beta epsilon)) xi_i."""
    step = svgd(theta, g, kappa, R, alpha=alpha, epsilon=epsilon, tau=tau, N=N, beta=1.0, smoothing=smoothing)
    rows = []
    for i in range(len(theta)):
        grad_u = N * g[i] + tau * theta[i]
        rows.append(step[i] + epsilon * (grad_u / beta - math.sqrt(2 / (beta * epsilon)) * xi[i]))
    return torch.stack(rows)


def sgld(theta: Tensor, g: Tensor, xi: Tensor, *, epsilon: float, tau: float, N: float, beta: float) -> Tensor:
    """Return epsilon grad U(theta_i) - sqrt(2 epsilon / beta) xi_i."""
    rows = [epsilon * (N * g[i] + tau * theta[i]) - math.sqrt(2 * epsilon / beta) * xi[i] for i in range(len(theta))]
    return torch.stack(rows)


def cosine_penalty(theta: Tensor, g: Tensor, *, alpha: float, epsilon: float) -> Tensor:
    """Return epsilon [ g_i + alpha / M sum_j grad_{theta_i} cos(theta_i, theta_j) ]."""
    M = len(theta)
    R = tangential_repulsion(theta, cosine)
    return torch.stack([epsilon * (g[i] - alpha * R[i] / M) for i in range(M)])


def cosine_repulsion(theta: Tensor, g: Tensor, *, alpha: float, epsilon: float) -> Tensor:
    """Return epsilon [ g_i - alpha / M sum_j grad_{theta_j} cos(theta_j, theta_i) ]."""
    M = len(theta)
    R = repulsion(theta, cosine)
    return torch.stack([epsilon * (g[i] - alpha * R[i] / M) for i in range(M)])


def _gradient(kappa: Kappa, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kappa(x, y.detach()), x)
    return gradient


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
