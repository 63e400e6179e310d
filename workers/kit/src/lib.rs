//! The program contract: what a capsule program implements and the frames it speaks with its agent.
