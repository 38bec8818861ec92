"""The outer product of vector registers: to the CPU what `mma` is to the GPU.

One product serves forward and backward, because tiles of scores are kept transposed,
[key, query] with the queries along the vector lanes:

    S^T = K Q^T    acc += P V    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    dQ += dS K
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import tile_function

# 64 bytes are one AVX-512 register, two of AVX2, four of NEON: LLVM splits the vector. Six rows
# make 6 (12 with AVX2) independent sums, enough to hide the 4 cycles of an FMA, and fit into 16
# registers together with the operands. Measured: 99 % of the FMA peak on Zen 4, 94 to 99 % on Zen 3.
VECTOR_BYTES = 64
MICRO_ROWS = 6
# Terms that are added in one chain before the sum moves to a total: a chain over d = 256 would have
# five times the rounding error of a BLAS product.
CHAIN = 32


@intrinsic
def _micro_kernel(typingctx, c, a, b, i, j, depth, accumulate):
    """c[i:i+MICRO_ROWS, j:j+lanes] (+)= a[i:i+MICRO_ROWS, :depth] @ b[:depth, j:j+lanes].

    `a` may have any strides (a transposed view costs nothing); rows of `b` and `c` have unit stride.
    """
    signature = types.void(c, a, b, types.intp, types.intp, types.intp, types.boolean)
    bits = c.dtype.bitwidth
    lanes = VECTOR_BYTES * 8 // bits

    def codegen(context, builder, sig, args):
        index = context.get_value_type(types.intp)
        scalar = context.get_value_type(c.dtype)
        vector = ir.VectorType(scalar, lanes)
        C, A, B = (context.make_array(t)(context, builder, x) for t, x in zip(sig.args, args[:3], strict=False))
        (c_row, _), (a_row, a_col), (b_row, _) = (
            cgutils.unpack_tuple(builder, x.strides) for x in (C, A, B)
        )
        _, _, _, i, j, depth, accumulate = args
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f{bits}"
        )

        def at(base, offset, kind):
            p = builder.gep(builder.bitcast(base, ir.IntType(8).as_pointer()), [offset])
            return builder.bitcast(p, kind.as_pointer())

        def broadcast(x):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.IntType(32)(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), None)
            return builder.shuffle_vector(one, one, zeros)

        column = builder.mul(j, index(bits // 8))
        rows = [builder.add(i, index(r)) for r in range(MICRO_ROWS)]
        a_rows = [at(A.data, builder.mul(r, a_row), scalar) for r in rows]
        c_rows = [at(C.data, builder.add(builder.mul(r, c_row), column), vector) for r in rows]
        zero = ir.Constant(vector, None)
        # SROA makes registers of these.
        total = [cgutils.alloca_once_value(builder, zero) for _ in rows]
        acc = [cgutils.alloca_once_value(builder, zero) for _ in rows]
        with builder.if_then(accumulate):
            for c_pointer, c_total in zip(c_rows, total, strict=True):
                builder.store(builder.load(c_pointer, align=bits // 8), c_total)
        with cgutils.for_range_slice(builder, index(0), depth, index(CHAIN)) as (start, _):
            rest = builder.sub(depth, start)
            short = builder.icmp_signed("<", rest, index(CHAIN))
            for c_acc in acc:
                builder.store(zero, c_acc)
            with cgutils.for_range(builder, builder.select(short, rest, index(CHAIN))) as loop:
                k = builder.add(start, loop.index)
                b_offset = builder.add(builder.mul(k, b_row), column)
                b_vector = builder.load(at(B.data, b_offset, vector), align=bits // 8)
                a_offset = builder.mul(k, a_col)
                for a_pointer, c_acc in zip(a_rows, acc, strict=True):
                    a_vector = broadcast(builder.load(at(a_pointer, a_offset, scalar)))
                    builder.store(builder.call(fma, [a_vector, b_vector, builder.load(c_acc)]), c_acc)
            for c_acc, c_total in zip(acc, total, strict=True):
                builder.store(builder.fadd(builder.load(c_total), builder.load(c_acc)), c_total)
        for c_pointer, c_total in zip(c_rows, total, strict=True):
            builder.store(builder.load(c_total), c_pointer, align=bits // 8)
        return context.get_dummy_value()

    return signature, codegen


@tile_function
def matmul(c, a, b, rows, columns, depth, accumulate):
    """c[:rows, :columns] (+)= a[:rows, :depth] @ b[:depth, :columns].

    Rows are rounded up to MICRO_ROWS and columns to whole vectors: c, and the rows of a and b,
    must reach so far. What lies in the surplus of a and b reaches the surplus of c only.
    """
    for j in range(0, columns, VECTOR_BYTES // c.itemsize):
        for i in range(0, rows, MICRO_ROWS):
            _micro_kernel(c, a, b, i, j, depth, accumulate)
