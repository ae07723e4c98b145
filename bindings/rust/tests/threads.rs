//! What may cross threads does; what may not is refused by the compiler, which the crate's documentation says.

mod common;

use common::*;
use folio::*;

fn is_send<T: Send>() {}
fn is_sync<T: Sync>() {}

#[test]
fn one_op_serves_several_threads() {
    is_sync::<Context>();
    is_sync::<Op>();
    is_sync::<KvPool>();
    is_sync::<CacheView<'_>>();
    is_send::<PlanBuffer>();
    is_send::<Plan<'_>>();
    is_send::<Workspace<'_>>();
    is_send::<TokenAllocator>();
    is_send::<ReqToTokenPool>();
    let context = Context::cpu(2).unwrap();
    let op = prepare(&context);
    let cache = filled_cache(&context, KvLayout::Nhd);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut buffer = PlanBuffer::new(&op).unwrap();
                for _ in 0..20 {
                    let plan = plan(&mut buffer, &op);
                    assert_result(&run(&plan, &op, cache.view().unwrap(), csr(&PAGE_IDS)).unwrap());
                }
            });
        }
    });
}

#[test]
fn messages_are_each_threads_own() {
    let error = Context::cpu(-1).unwrap_err();
    let other = std::thread::spawn(|| Context::with_kernel(1, "x\0").unwrap_err())
        .join()
        .unwrap();
    assert_ne!(error.message(), other.message());
}

#[test]
fn structures_have_the_librarys_sizes() {
    // An init function refuses a size that the linked library does not know.
    macro_rules! known {
        ($($name:ident: $init:ident),*) => {$({
            let mut value = std::mem::MaybeUninit::<ffi::$name>::uninit();
            let size = std::mem::size_of::<ffi::$name>();
            // SAFETY: room for size bytes.
            unsafe {
                assert_eq!(ffi::$init(value.as_mut_ptr(), size), ffi::FOLIO_OK, stringify!($name));
                assert_eq!(ffi::$init(value.as_mut_ptr(), size - 4), ffi::FOLIO_INVALID_ARGUMENT, stringify!($name));
            }
        })*};
    }
    known!(
        folio_context_options: folio_context_options_init,
        folio_attention_config: folio_attention_config_init,
        folio_prepare_options: folio_prepare_options_init,
        folio_batch: folio_batch_init,
        folio_kv_segment: folio_kv_segment_init,
        folio_segment_args: folio_segment_args_init,
        folio_attention_args: folio_attention_args_init,
        folio_cache_write_args: folio_cache_write_args_init,
        folio_kv_pool_config: folio_kv_pool_config_init
    );
    assert_eq!(version(), env!("CARGO_PKG_VERSION"));
}
