//! The happens-before checker.
