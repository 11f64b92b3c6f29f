//! Where this process stands in its job: rank, number of ranks, where they meet and what proves membership.
//!
//! Read from the environment of whoever started it, in this order:
//!
//! | started by | variables |
//! |---|---|
//! | `torchrun`, `--launch` and by hand | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` |
//! | `mpirun` of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
//! | `srun` of Slurm | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_JOB_NODELIST`, `SLURM_JOB_ID` |
//! | nobody | a job of one rank |
//!
//! `MASTER_ADDR` and `MASTER_PORT` count with all of them. Under `torchrun` its agent listens at `MASTER_PORT`, so the
//! ranks meet at the next one. More than one rank needs `SESSILE_JOB_SECRET`, the same on all.

use std::ops::RangeInclusive;

/// A process's place in its job.
#[derive(Clone, PartialEq, Eq)]
pub struct Job {
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Position among the ranks of this machine.
    pub local_rank: u32,
    /// Where rank 0 listens.
    pub address: String,
    /// Its port.
    pub port: u16,
    /// What all ranks know and nobody else does.
    pub secret: Vec<u8>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "rank {} of {} ({} on this machine) at {}:{}",
            self.rank, self.world, self.local_rank, self.address, self.port
        )
    }
}

/// What is wrong with the environment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// A variable is absent although others of its kind are there.
    #[error("{by} sets no {name}: set it, or start with --launch")]
    Missing {
        /// Who started the process.
        by: &'static str,
        /// The variable.
        name: &'static str,
    },
    /// A variable holds no number in range.
    #[error("{name}={value} is not a number from {least} up to {most}: set one, or start with --launch")]
    Number {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// The least that it may be.
        least: u64,
        /// The most.
        most: u64,
    },
    /// No secret, or a short one.
    #[error(
        "{world} ranks need SESSILE_JOB_SECRET, at least {least} characters and the same on every rank (it has \
         {have}): for example export SESSILE_JOB_SECRET=$(head -c 24 /dev/urandom | base64)"
    )]
    Secret {
        /// Number of ranks.
        world: u32,
        /// Characters needed.
        least: usize,
        /// Characters given.
        have: usize,
    },
}

/// Shortest secret, in bytes.
const SECRET: usize = 16;

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Job {
    /// A job of one rank.
    pub fn alone() -> Self {
        Job { rank: 0, world: 1, local_rank: 0, address: "127.0.0.1".to_owned(), port: 0, secret: Vec::new() }
    }

    /// Environments of `world` ranks of a new job on this machine, by rank: a free port, a fresh secret.
    ///
    /// # Errors
    /// Those of the system: no port is free, or no random bytes.
    pub fn on_this_machine(world: u32) -> std::io::Result<Vec<Vec<(&'static str, String)>>> {
        let port = std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let secret: String = crate::link::random()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let environment = |rank: u32| {
            vec![
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", world.to_string()),
                ("LOCAL_RANK", rank.to_string()),
                ("MASTER_ADDR", "127.0.0.1".to_owned()),
                ("MASTER_PORT", port.to_string()),
                ("SESSILE_JOB_SECRET", secret.clone()),
            ]
        };
        Ok((0..world).map(environment).collect())
    }

    /// Reads the process's environment.
    ///
    /// # Errors
    /// [`JobError`].
    pub fn from_env() -> Result<Self, JobError> {
        Self::from_vars(&|name| std::env::var(name).ok())
    }

    /// Reads an environment.
    ///
    /// # Errors
    /// [`JobError`].
    pub fn from_vars(get: Lookup<'_>) -> Result<Self, JobError> {
        let (by, names): (_, [&'static str; 3]) = if get("RANK").is_some() {
            ("the launcher", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
        } else if get("OMPI_COMM_WORLD_RANK").is_some() {
            ("mpirun", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"])
        } else if get("SLURM_PROCID").is_some() && get("SLURM_STEP_ID").is_some() {
            ("srun", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"])
        } else {
            return Ok(Job::alone());
        };
        let world = number(get, by, names[1], 1..=1 << 20)?;
        let world32 = u32::try_from(world).unwrap_or(1);
        let rank = number(get, by, names[0], 0..=world - 1)?;
        let local_rank = number(get, by, names[2], 0..=world - 1)?;
        let secret = get("SESSILE_JOB_SECRET").unwrap_or_default().into_bytes();
        if world32 > 1 && secret.len() < SECRET {
            return Err(JobError::Secret { world: world32, least: SECRET, have: secret.len() });
        }
        Ok(Job {
            rank: u32::try_from(rank).unwrap_or(0),
            world: world32,
            local_rank: u32::try_from(local_rank).unwrap_or(0),
            address: address(get, by, world32)?,
            port: port(get, by, world32)?,
            secret,
        })
    }
}

fn number(
    get: Lookup<'_>,
    by: &'static str,
    name: &'static str,
    range: RangeInclusive<u64>,
) -> Result<u64, JobError> {
    let value = get(name).ok_or(JobError::Missing { by, name })?;
    let parsed = value.trim().parse().ok().filter(|number| range.contains(number));
    parsed.ok_or(JobError::Number { name, value, least: *range.start(), most: *range.end() })
}

fn address(get: Lookup<'_>, by: &'static str, world: u32) -> Result<String, JobError> {
    if let Some(address) = get("MASTER_ADDR").filter(|address| !address.is_empty()) {
        return Ok(address);
    }
    let one_machine = get("OMPI_COMM_WORLD_LOCAL_SIZE").is_some_and(|size| size.trim() == world.to_string());
    if world == 1 || one_machine {
        return Ok("127.0.0.1".to_owned());
    }
    let first =
        get("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST")).and_then(|list| first_host(&list));
    first.ok_or(JobError::Missing { by, name: "MASTER_ADDR" })
}

fn port(get: Lookup<'_>, by: &'static str, world: u32) -> Result<u16, JobError> {
    if get("MASTER_PORT").is_some() {
        let taken = u64::from(get("TORCHELASTIC_RUN_ID").is_some());
        let port = number(get, by, "MASTER_PORT", 1..=65_535 - taken)?;
        return Ok(u16::try_from(port + taken).unwrap_or(u16::MAX));
    }
    if world == 1 {
        return Ok(0);
    }
    if get("SLURM_JOB_ID").is_some() {
        // The same on all ranks of a job, and rarely that of another job on the machine.
        let job = number(get, by, "SLURM_JOB_ID", 0..=u64::MAX)?;
        return Ok(u16::try_from(20_000 + job % 20_000).unwrap_or(20_000));
    }
    Err(JobError::Missing { by, name: "MASTER_PORT" })
}

/// The first name of a Slurm list such as `gpu[003-007,011],login1`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (stem, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        Some(ranges) => {
            let first = ranges.split([',', '-', ']']).next()?;
            let tail = ranges.split_once(']').map_or("", |(_, tail)| tail.split(',').next().unwrap_or(""));
            format!("{stem}{first}{tail}")
        }
        None => stem.to_owned(),
    };
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(vars: &[(&str, &str)]) -> Result<Job, JobError> {
        let secret = [("SESSILE_JOB_SECRET", "0123456789abcdef")];
        let all: Vec<_> = vars.iter().copied().chain(secret).collect();
        Job::from_vars(&|name| all.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    const TORCH: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn each_launcher_is_read() {
        let by_hand = job(&TORCH).expect("complete");
        assert_eq!((by_hand.rank, by_hand.world, by_hand.local_rank), (3, 8, 1));
        assert_eq!((by_hand.address.as_str(), by_hand.port), ("node7", 29500));
        let torchrun = job(&[&TORCH[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat()).expect("complete");
        assert_eq!(torchrun.port, 29501, "the agent listens at MASTER_PORT");
        let slurm = job(&[
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "6"),
            ("SLURM_LOCALID", "2"),
            ("SLURM_JOB_NODELIST", "gpu[003-007,011],login1"),
            ("SLURM_JOB_ID", "123456"),
        ])
        .expect("complete");
        assert_eq!((slurm.rank, slurm.world, slurm.local_rank), (5, 6, 2));
        assert_eq!((slurm.address.as_str(), slurm.port), ("gpu003", 20_000 + 3456));
        let mpi = job(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("MASTER_PORT", "4000"),
        ])
        .expect("complete");
        assert_eq!((mpi.rank, mpi.world, mpi.address.as_str(), mpi.port), (1, 2, "127.0.0.1", 4000));
        assert_eq!(job(&[]), Ok(Job::alone()));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for absent in ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] {
            let vars: Vec<_> = TORCH.into_iter().filter(|(name, _)| *name != absent).collect();
            let error = job(&vars).expect_err("incomplete").to_string();
            assert!(error.contains(absent), "{error}");
        }
        let wrong = [
            ("RANK", "8"),
            ("RANK", "-1"),
            ("WORLD_SIZE", "x"),
            ("WORLD_SIZE", "0"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "65536"),
        ];
        for (name, value) in wrong {
            let vars: Vec<_> = TORCH.map(|(n, v)| (n, if n == name { value } else { v })).to_vec();
            let error = job(&vars).expect_err("out of range").to_string();
            assert!(error.contains(&format!("{name}={value} is not")) && error.contains("up to"), "{error}");
        }
    }

    #[test]
    fn the_last_port_is_one_unless_torchrun_takes_it() {
        let last = TORCH.map(|(name, value)| (name, if name == "MASTER_PORT" { "65535" } else { value }));
        assert_eq!(job(&last).expect("complete").port, 65_535);
        let torchrun = job(&[&last[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat());
        assert!(torchrun.is_err_and(|error| error.to_string().contains("up to 65534")));
    }

    #[test]
    fn several_ranks_need_a_secret_and_it_is_never_shown() {
        let vars = TORCH;
        let bare =
            Job::from_vars(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()));
        assert_eq!(bare, Err(JobError::Secret { world: 8, least: 16, have: 0 }));
        let shown = format!("{:?}", job(&TORCH).expect("complete"));
        assert!(!shown.contains("0123456789abcdef"), "{shown}");
    }

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, first) in [
            ("a", Some("a")),
            ("a,b", Some("a")),
            ("n[1-3]", Some("n1")),
            ("n[07,09]-ib", Some("n07-ib")),
            ("", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }
}
