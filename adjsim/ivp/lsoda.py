"""LSODA with a step that ends in a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.integrate

# Factor by which a step that ended in NaN is shortened.
SHORTER = 8.0


class LSODA(scipy.integrate.LSODA):
    """SciPy's LSODA, which does not accept a step to a state that is not finite.

    ODEPACK compares the error of a step with its tolerance, and NaN passes this comparison. So a
    step beyond the domain of ``fun`` would be accepted. Here such a step is taken again from its
    start, as a first step of a shorter length. All other steps are SciPy's, to the last bit.
    """

    def _step_impl(self) -> Any:
        t, y, base = self.t, self.y, super()
        success, message = base._step_impl()
        while success and not np.isfinite(self.y).all() and np.isfinite(y).all():
            step = (self.t - t) / SHORTER
            if abs(step) < 10 * np.abs(np.nextafter(t, self.direction * np.inf) - t):
                return False, self.TOO_SMALL_STEP
            ode: Any = self._lsoda_solver
            ode._integrator.first_step = step
            ode.set_initial_value(y, t)
            # As SciPy does at its start: a step does not go beyond this time.
            ode._integrator.rwork[0] = self.t_bound
            success, message = base._step_impl()
        return success, message
