//! From texts to token ids: what preparation and packing need to know of a tokenizer.

use feedline_base::error::Result;

/// Turns a text into token ids: a tokenizer with all its settings.
pub trait ToIds: Send + Sync + 'static {
    /// Appends the ids of `text` to `out`. The same text gives the same ids on any thread.
    fn ids(&self, text: &str, out: &mut Vec<u32>) -> Result<()>;

    /// Whether [`ids_and_loss`](Self::ids_and_loss) gives a mask of the loss.
    fn has_loss(&self) -> bool {
        false
    }

    /// Like [`ids`](Self::ids), and appends 1 to `loss` for each id that is to be learned, else 0;
    /// nothing without a mask.
    fn ids_and_loss(&self, text: &str, ids: &mut Vec<u32>, loss: &mut Vec<u8>) -> Result<()> {
        let _ = loss;
        self.ids(text, ids)
    }

    /// Number of ids: all are below it.
    fn vocabulary(&self) -> u64;

    /// Maximum number of ids of a text.
    fn most(&self) -> usize {
        usize::MAX
    }

    /// Hash of everything that decides the ids; the same in every process and on every machine.
    fn identity(&self) -> u64;
}

impl<T: ToIds + ?Sized> ToIds for std::sync::Arc<T> {
    fn ids(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        (**self).ids(text, out)
    }

    fn has_loss(&self) -> bool {
        (**self).has_loss()
    }

    fn ids_and_loss(&self, text: &str, ids: &mut Vec<u32>, loss: &mut Vec<u8>) -> Result<()> {
        (**self).ids_and_loss(text, ids, loss)
    }

    fn vocabulary(&self) -> u64 {
        (**self).vocabulary()
    }

    fn most(&self) -> usize {
        (**self).most()
    }

    fn identity(&self) -> u64 {
        (**self).identity()
    }
}
