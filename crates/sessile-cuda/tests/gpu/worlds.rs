//! Ranks as threads of this process, on as many GPUs as there are.

use std::net::TcpListener;
use std::time::Duration;

use sessile_conformance::Worlds;
use sessile_cuda::job::Job;
use sessile_cuda::{CudaDevice, DeviceOptions};
use sessile_hal::DeviceError;

/// GPUs of this machine, or why there are none.
pub(crate) fn gpus() -> Result<u32, DeviceError> {
    sessile_cuda::gpus().map(|gpus| gpus.len() as u32)
}

/// Whether a test can run that needs `gpus` GPUs; says so if not. `SESSILE_GPU=required` makes that a failure.
pub(crate) fn can_run(test: &str, needed: u32) -> bool {
    let why = match gpus() {
        Ok(have) if have >= needed => return true,
        Ok(have) => format!("it needs {needed} GPUs, {have} are visible"),
        Err(error) => error.to_string(),
    };
    assert_ne!(std::env::var("SESSILE_GPU").as_deref(), Ok("required"), "{test}: {why}");
    eprintln!("skipped: {test}: {why}");
    false
}

/// Ranks of one process.
pub(crate) struct Threads {
    pub(crate) options: DeviceOptions,
    /// What is different on a rank.
    pub(crate) tune: fn(u32, &mut DeviceOptions),
}

impl Threads {
    pub(crate) fn new() -> Self {
        let options = DeviceOptions { deadline: Duration::from_secs(60), ..DeviceOptions::default() };
        Threads { options, tune: |_, _| {} }
    }

    /// Runs a program on every rank; the results in order of rank.
    pub(crate) fn results<T: Send>(&self, ranks: u32, program: impl Fn(CudaDevice) -> T + Sync) -> Vec<T> {
        let port = TcpListener::bind("127.0.0.1:0").expect("binds").local_addr().expect("address").port();
        let gpus = gpus().expect("checked");
        let (program, options) = (&program, &self.options);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..ranks)
                .map(|rank| {
                    scope.spawn(move || {
                        let job = Job {
                            rank,
                            world: ranks,
                            local_rank: rank,
                            address: "127.0.0.1".to_owned(),
                            port,
                            secret: b"a secret of tests".to_vec(),
                        };
                        let mut options = DeviceOptions { ordinal: Some(rank % gpus), ..options.clone() };
                        (self.tune)(rank, &mut options);
                        program(CudaDevice::open(&job, options).unwrap_or_else(|why| panic!("{why}")))
                    })
                })
                .collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().unwrap_or_else(|why| std::panic::resume_unwind(why)))
                .collect()
        })
    }
}

impl Worlds for Threads {
    type Device = CudaDevice;

    fn run(&self, ranks: u32, program: impl Fn(CudaDevice) + Sync) {
        self.results(ranks, program);
    }
}
