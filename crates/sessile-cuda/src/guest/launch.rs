//! Launches of the framework's graphs that are made again and again.

use std::sync::Arc;

use cudarc::driver::sys;
use sessile_hal::DeviceError;

use super::stream::record_then_wait;
use super::{Guest, GuestEvent};
use crate::error::cuda;

/// A launch of an executable graph of the framework that is made again and again: its handles, made once.
pub struct GuestLaunch {
    guest: Arc<Guest>,
    exec: sys::CUgraphExec,
    /// For a graph that others run beside: its stream, its start, its completion.
    beside: Option<(sys::CUstream, GuestEvent, GuestEvent)>,
}

// SAFETY: driver handles, which any thread may use whose current context is theirs; `launch` sees to that.
unsafe impl Send for GuestLaunch {}
// SAFETY: as for `Send`; what one launch at a time is needed for is a promise of `launch`'s caller.
unsafe impl Sync for GuestLaunch {}

impl GuestLaunch {
    /// `beside`: a stream of the graph's own, an event for its start, and the event that it records at its completion.
    pub fn new(guest: &Arc<Guest>, exec: u64, beside: Option<(u64, GuestEvent, GuestEvent)>) -> GuestLaunch {
        let beside = beside.map(|(lane, start, completion)| (lane as sys::CUstream, start, completion));
        GuestLaunch { guest: guest.clone(), exec: exec as sys::CUgraphExec, beside }
    }

    /// Calls of the driver that enqueue something, in one launch.
    pub fn calls(&self) -> u32 {
        if self.beside.is_some() { 4 } else { 1 }
    }

    /// Launches the graph on `main`; one that others run beside on its own stream behind what `main` has, and `main` then
    /// waits for its completion. Nothing is allocated.
    ///
    /// # Safety
    /// `main`, the own stream and the executable are alive and of this GPU; neither stream captures; no other thread
    /// launches the executable now.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub unsafe fn launch(&self, main: u64) -> Result<(), DeviceError> {
        let main = main as sys::CUstream;
        self.guest.context.be_current()?;
        let Some((lane, start, completion)) = &self.beside else {
            // SAFETY: the caller's promise; their context is current.
            return unsafe { cuda!(cuGraphLaunch(self.exec, main)) };
        };
        let (start, completion) = (start.raw()?.raw(), completion.raw()?.raw());
        // SAFETY: the caller's promise; the events are borrowed; all are of the context made current above.
        unsafe { record_then_wait(start, main, *lane) }?;
        // SAFETY: as above.
        unsafe { cuda!(cuGraphLaunch(self.exec, *lane)) }?;
        // SAFETY: as above.
        unsafe { cuda!(cuStreamWaitEvent(main, completion, 0)) }
    }

    /// The same around a launch that somebody else makes on [`GuestLaunch::lane`]: what comes before it.
    ///
    /// # Safety
    /// As for [`GuestLaunch::launch`].
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub unsafe fn before(&self, main: u64) -> Result<(), DeviceError> {
        match &self.beside {
            // SAFETY: the caller's promise.
            Some((lane, start, _)) => unsafe { self.guest.order(start, main, *lane as u64) },
            None => Ok(()),
        }
    }

    /// And what comes after it.
    ///
    /// # Safety
    /// As for [`GuestLaunch::launch`].
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub unsafe fn after(&self, main: u64) -> Result<(), DeviceError> {
        let Some((_, _, completion)) = &self.beside else { return Ok(()) };
        self.guest.context.be_current()?;
        // SAFETY: the caller's promise; the event is borrowed; both are of the current context.
        unsafe { cuda!(cuStreamWaitEvent(main as sys::CUstream, completion.raw()?.raw(), 0)) }
    }

    /// The graph's own stream, if it has one.
    pub fn lane(&self) -> Option<u64> {
        self.beside.as_ref().map(|(lane, ..)| *lane as u64)
    }
}
