//! Launches of a captured runner, as one call from Python.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use crate::cuda::Launch;
use crate::error::Failure;
use crate::storage::Core;

/// Launches the graph of one runner, in the sealed order. Made once; a call creates nothing.
///
/// The framework's own `replay` makes the launch while `by_hand` says so: it advances the state of random numbers. From
/// then on the executable graph is launched as it is.
#[pyclass(frozen, module = "sessile._sessile")]
pub(crate) struct Launcher {
    core: Py<Core>,
    /// The plan that it belongs to.
    seal: u64,
    runner: usize,
    /// `None` on a device without streams.
    launch: Option<Launch>,
    /// Makes the launch by the framework; says whether the next one must be made like that too.
    by_hand: Py<PyAny>,
    direct: AtomicBool,
    main: Main,
    /// Keeps the executable.
    _graph: Py<PyAny>,
}

/// The stream behind which launches are put.
enum Main {
    Fixed(u64),
    /// What this function gives for this argument.
    Asked(Py<PyAny>, Py<PyAny>),
}

#[pymethods]
impl Launcher {
    /// `exec`: the executable graph, 0 if it is not known. `lane`: a stream of the runner's own. `main`: a stream, or the
    /// function that gives the current one for `ordinal`.
    #[new]
    #[pyo3(signature = (core, runner, graph, exec, lane, main, ordinal, by_hand, direct))]
    #[expect(clippy::too_many_arguments, reason = "the parts of a launch, one by one")]
    fn new(
        py: Python<'_>,
        core: Py<Core>,
        runner: usize,
        graph: Py<PyAny>,
        exec: u64,
        lane: Option<u64>,
        main: Py<PyAny>,
        ordinal: Py<PyAny>,
        by_hand: Py<PyAny>,
        direct: bool,
    ) -> PyResult<Launcher> {
        let main = match main.extract::<u64>(py) {
            Ok(stream) => Main::Fixed(stream),
            Err(_) => Main::Asked(main, ordinal),
        };
        let (seal, launch) = core.try_borrow(py)?.launch_of(runner, exec, lane);
        let direct = AtomicBool::new(direct && exec != 0 && launch.is_some());
        Ok(Launcher { core, seal, runner, launch, by_hand, direct, main, _graph: graph })
    }

    /// Whether launches are made without the framework.
    #[getter]
    fn direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Calls of the driver that enqueue something, in one launch.
    #[getter]
    fn driver_calls(&self) -> u32 {
        self.launch.as_ref().map_or(0, Launch::calls)
    }

    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let main = match &self.main {
            Main::Fixed(stream) => *stream,
            Main::Asked(current, ordinal) => current.call1(py, (ordinal,))?.extract(py)?,
        };
        let direct = self.direct();
        {
            let mut core = self.core.try_borrow_mut(py)?;
            core.next_launch(self.seal, self.runner, main)?;
            if let (Some(cuda), Some(launch)) = (core.cuda_mut(), &self.launch) {
                if direct {
                    cuda.launch(launch, main).map_err(Failure::from)?;
                    core.log_launch(self.runner, main, launch.lane());
                } else {
                    cuda.before_launch(launch, main).map_err(Failure::from)?;
                }
            }
        }
        if direct {
            return Ok(());
        }
        let again: bool = self.by_hand.call0(py)?.extract(py)?;
        let mut core = self.core.try_borrow_mut(py)?;
        if let (Some(cuda), Some(launch)) = (core.cuda_mut(), &self.launch) {
            cuda.after_launch(launch, main).map_err(Failure::from)?;
        }
        core.log_launch(self.runner, main, self.launch.as_ref().and_then(Launch::lane));
        self.direct.store(!again && self.launch.is_some(), Ordering::Relaxed);
        Ok(())
    }
}
