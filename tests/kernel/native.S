        .intel_syntax noprefix
        .text
# long start(struct clone_args *args, size_t size, struct op *ops, long unused, long status)
start:  mov     eax, 435
        syscall
        test    rax, rax
        jz      child
        ret
child:  mov     rbx, rdx
        mov     r15, r8
        xor     r14d, r14d
next:   mov     rax, [rbx]
        mov     rdi, [rbx+8]
        mov     rsi, [rbx+16]
        mov     rdx, [rbx+24]
        mov     r10, [rbx+32]
        mov     r8,  [rbx+40]
        mov     r9,  [rbx+48]
        syscall
        mov     ecx, [rbx+56]
        cmp     rax, -4095
        jae     failed
        test    ecx, 1
        jz      step
        test    rax, rax
        jz      leave
step:   add     rbx, 72
        jmp     next
failed: neg     eax
        test    ecx, 2
        jz      report
        cmp     eax, 13
        jne     1f
        mov     r14d, eax
        jmp     absent
1:      cmp     eax, 2
        je      absent
        cmp     eax, 20
        jne     report
absent: test    ecx, 4
        jz      step
        test    r14d, r14d
        cmovnz  eax, r14d
report: mov     [rbx+68], eax
        mov     eax, 1
        mov     rdi, r15
        lea     rsi, [rbx+64]
        mov     edx, 8
        syscall
leave:  mov     eax, 231
        mov     edi, 1
        syscall
