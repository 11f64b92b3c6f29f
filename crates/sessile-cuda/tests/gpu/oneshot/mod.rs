//! The one-shot reduce-scatter, for groups of any size on the GPUs that there are, several ranks on one.

mod bits;
mod rounds;
mod waits;

use half::bf16;
use sessile_conformance::bytes;
use sessile_cuda::{CudaComm, CudaDevice, CudaMemory, Way};
use sessile_hal::{Collective, Comm, Device, Transfer, View};
use sessile_plan::{DType, Domain};

use crate::worlds::Threads;

type Vista = View<CudaMemory>;

const WAYS: [Option<Way>; 5] = [None, Some(Way::Push), Some(Way::Pull), Some(Way::Bulk), Some(Way::Copy)];

fn going(way: Option<Way>) -> Threads {
    let mut worlds = Threads::new();
    worlds.options.one_shot.way = way;
    worlds
}

fn everyone(device: &CudaDevice) -> CudaComm {
    let ranks: Vec<u32> = (0..device.world_size()).collect();
    device.communicator("all", &ranks).expect("comm")
}

/// Registered memory for `elements`, from byte `offset`.
fn registered(device: &CudaDevice, comm: &CudaComm, dtype: DType, offset: u64, elements: u64) -> Vista {
    let domain = Domain::Symmetric(comm.name().to_owned());
    let memory = device.alloc(offset + elements * dtype.size(), &domain, "window").expect("alloc");
    device.register_window(comm, &memory).expect("register");
    View::new(&memory, offset, elements, dtype).expect("aligned")
}

/// The same with `values`.
fn window(device: &CudaDevice, comm: &CudaComm, dtype: DType, offset: u64, values: &[f32]) -> Vista {
    let view = registered(device, comm, dtype, offset, values.len() as u64);
    let stream = device.stream("upload").expect("stream");
    device.write(&stream, &view, &encode(dtype, values)).expect("write");
    view
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => bytes(values),
    }
}

const SUM: Collective = Collective::ReduceScatterAccumulate { scale: 1.0 };

/// A graph of `times` reduce-scatters on a stream.
fn graph_of(
    device: &CudaDevice,
    comm: &CudaComm,
    stream: &sessile_cuda::CudaStream,
    transfers: &[Transfer<CudaMemory>],
) -> sessile_cuda::CudaGraph {
    device.begin_capture(stream).expect("begin");
    for transfer in transfers {
        device.collective(stream, comm, SUM, &transfer.send, &transfer.recv).expect("collective");
    }
    device.end_capture(stream).expect("end")
}
