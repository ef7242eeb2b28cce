import torch

from kvdata.edits.solving import solve_definite


def test_a_batch_is_solved_with_all_threads() -> None:
    """As large as a refit's: where `torch.linalg.solve` did not return, this test would not end."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 600, 512, generator=generator)
    matrix, wanted = rows.mT @ rows / 600 + 0.1 * torch.eye(512), torch.randn(3, 512, 8, generator=generator)
    torch.testing.assert_close(solve_definite(matrix, matrix @ wanted), wanted, atol=1e-3, rtol=1e-3)
